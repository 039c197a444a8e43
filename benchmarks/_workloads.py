"""Workloads of the benchmarks: six models, their wrappers, one training step."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from types import MappingProxyType

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp import LegacyDistributedDataParallel, SyncRecord

VOCABULARY, WIDTH, LAYERS, HEADS, SEQUENCE, BATCH = 3328, 256, 10, 4, 32, 2
TINY_TENSORS, TINY_NUMEL = 10_000, 16
EMBEDDING_ROWS, EMBEDDING_WIDTH, EMBEDDING_BATCH = 2**18, 2**8, 2**10


@dataclass(frozen=True)
class Workload:
    """A model, its micro-batches, and the loss of a micro-batch; ``build`` makes a new model at every call."""

    build: Callable[[], nn.Module]
    batches: Callable[[int], Sequence[torch.Tensor]]  # by how many there are in a step
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Transformer(nn.Module):
    """8.8 million parameters in 123 tensors."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(self.embedding(tokens))) @ self.embedding.weight.T


class Residual(nn.Module):
    """Two convolutions with batch normalisation, added to the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(2):
            layers += [nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return (image + self.layers(image)).relu()


def small_resnet() -> nn.Module:
    """0.28 million parameters in 164 tensors, nine of them larger than 9 KiB: a ResNet for small images."""
    stages = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)]
    stages += [Residual(16) for _ in range(22)]
    stages += [nn.Conv2d(16, 48, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(48)]
    stages += [Residual(48) for _ in range(4)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


class TinyTensors(nn.Module):
    """Many tensors of a few elements and little computation, to measure the work per tensor."""

    def __init__(self, count: int = TINY_TENSORS, numel: int = TINY_NUMEL) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(torch.randn(numel) for _ in range(count))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.tensors)) * factor


def small_net() -> nn.Module:
    """2,176 parameters in 16 tensors: a step is the work of Python and of waking up, and hardly any computation."""
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(16, 16), nn.Tanh())))


def tokens(update_freq: int) -> Sequence[torch.Tensor]:
    """Micro-batches of a language model."""
    return list(torch.randint(VOCABULARY, (update_freq, BATCH, SEQUENCE)))


def predict_tokens(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    # The next token: a shallow model with tied embeddings knows its own input, and then all gradients are 0.
    return nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.roll(-1, dims=-1).flatten())


def mean_square(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def _embedding(*, sparse: bool) -> Workload:
    return Workload(
        partial(nn.Embedding, EMBEDDING_ROWS, EMBEDDING_WIDTH, sparse=sparse),
        lambda update_freq: list(torch.randint(EMBEDDING_ROWS, (update_freq, EMBEDDING_BATCH))),
        mean_square,
    )


WORKLOADS: Mapping[str, Workload] = MappingProxyType(
    {
        "transformer": Workload(Transformer, tokens, predict_tokens),
        "resnet": Workload(small_resnet, lambda update_freq: list(torch.randn(update_freq, 4, 3, 16, 16)), mean_square),
        "small": Workload(small_net, lambda update_freq: list(torch.randn(update_freq, 8, 16)), mean_square),
        "tiny": Workload(TinyTensors, lambda update_freq: list(torch.randn(update_freq, 1)), mean_square),
        "embedding": _embedding(sparse=False),
        "sparse embedding": _embedding(sparse=True),
    }
)


def workload_named(name: str, *, layers: int = LAYERS) -> Workload:
    """The workload of that name in ``WORKLOADS``; ``layers``: of the transformer."""
    workload = WORKLOADS[name]
    return replace(workload, build=partial(Transformer, layers)) if workload.build is Transformer else workload


# Buffers are left alone by all of them: the question is what synchronising gradients costs.
# Older torches have another name for the setting.
_SETTING = "forward_sync_buffers"
_IS_KNOWN = _SETTING in signature(DistributedDataParallel.__init__).parameters
_ddp = partial(DistributedDataParallel, **{_SETTING if _IS_KNOWN else "broadcast_buffers": False})
WRAPPERS: Mapping[str, Callable[[nn.Module], nn.Module]] = MappingProxyType(
    {
        "torch DDP": _ddp,
        "torch DDP, bucket views": partial(_ddp, gradient_as_bucket_view=True),
        "torch DDP, static graph": partial(_ddp, static_graph=True),
        "ours, off": partial(LegacyDistributedDataParallel, checks="off"),
        "ours, info": partial(LegacyDistributedDataParallel, checks="info"),
    }
)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    batches: Sequence[torch.Tensor],
    *,
    set_to_none: bool,
    synchronize: Callable[[], object] = lambda: None,
) -> SyncRecord | None:
    """One training step; returns the record of ``all_reduce()``, if any. ``synchronize``: for a plain model.

    Collective for a wrapped model. torch DDP needs no_sync() before the last micro-batch; legacy_ddp does not.
    """
    optimizer.zero_grad(set_to_none=set_to_none)
    for index, batch in enumerate(batches):
        is_last = index == len(batches) - 1
        with model.no_sync() if isinstance(model, DistributedDataParallel) and not is_last else nullcontext():
            loss(model, batch).backward()
    record = model.all_reduce() if isinstance(model, LegacyDistributedDataParallel) else None
    synchronize()
    optimizer.step()
    return record
