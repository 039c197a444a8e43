"""Steps of micro-batches with gradients of every dtype and of many sizes, for reproducible sums."""

from collections.abc import Sequence
from typing import Any

import torch

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.reference_tree import Window, wrap_reproducible
from tests.helpers.small_sizes import sum_chunks_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
SIZES = (1, 63, 65, 1000)
CHUNK = 64  # many chunks in a small tensor


def mixed_window(seed: int, count: int, items: Sequence[int] | None = None, *, in_blocks: bool = True) -> Window:
    """Random gradients of many magnitudes, negative zeros, and a gradient missing here and there."""
    generator = torch.Generator().manual_seed(seed)
    leaves: list[list[torch.Tensor | None]] = []
    for number in range(count):
        grads: list[torch.Tensor | None] = []
        for index, (dtype, numel) in enumerate((dtype, numel) for dtype in DTYPES for numel in SIZES):
            values = torch.randn(numel, 2, generator=generator, dtype=torch.float64)
            values *= 2.0 ** torch.randint(-12, 6, values.shape, generator=generator)
            values[::7] = -0.0
            own = torch.view_as_complex(values) if dtype.is_complex else values[:, 0].contiguous()
            grads.append(None if (number + index + seed) % 5 == 0 else own.to(dtype))
        leaves.append(grads)
    return Window(leaves, items or [3] * count, in_blocks=in_blocks)


def counted(window: Window) -> Window:
    """The same step, without the gradients of micro-batches of 0 items."""
    leaves = [leaf if count else [None] * len(leaf) for leaf, count in zip(window.leaves, window.counts, strict=True)]
    return Window(leaves, window.counts)


def mixed_model(**options: Any) -> LegacyDistributedDataParallel:
    """A wrapper of the parameters of a window."""
    sum_chunks_of(CHUNK)
    return wrap_reproducible([torch.ones(numel, dtype=dtype) for dtype in DTYPES for numel in SIZES], **options)
