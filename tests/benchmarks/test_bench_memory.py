"""Second copies of the gradients, found in both ways to count, and the arithmetic of the benchmark of memory."""

from functools import cache, partial
from typing import Any

import _memory
import _workloads
import bench_memory
import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, SyncRecord
from tests.helpers.ranks import run_ranks

Span, Use = _memory.Span, _memory.Use

# Of a square matrix of 36 MiB. The 128 KiB for a chunk of the host transport's sum and 90 KiB for digests are 0.006 of
# the matrix. From 32 MiB on malloc gives back what is freed, whatever its settings.
WIDTH = 3072
# One run in five misses that a tensor is freed; all of six, one in 15,000.
REPEATS = {"allocator": 6, "rss": 1}


class _KeepsCopy(LegacyDistributedDataParallel):
    """Holds a second copy of all gradients."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, transport="gloo")
        self.copies = [torch.ones_like(parameter) for parameter in module.parameters()]


class _MakesCopy(LegacyDistributedDataParallel):
    """Makes a second copy in each call, and drops it."""

    def all_reduce(self, *args: Any, **kwargs: Any) -> SyncRecord:
        copies = [parameter.grad.clone() for parameter in self.parameters()]
        record = super().all_reduce(*args, **kwargs)
        del copies
        return record


WRAPS = {**bench_memory.WRAPS, "keeps a copy": _KeepsCopy, "makes a copy": partial(_MakesCopy, transport="gloo")}


def _use(rank: int, wrap: str, way: str, set_to_none: bool) -> dict[str, int]:
    workload = _workloads.Workload(
        partial(nn.Linear, WIDTH, WIDTH, bias=False), lambda count: torch.randn(count, 2, WIDTH), _workloads.mean_square
    )
    job = bench_memory.Job("", wrap, set_to_none, way, steps=3, device="cpu")
    return vars(bench_memory.measure_rank(WRAPS[wrap], workload, bench_memory.METERS[way](), job))


@cache
def _greatest_use(wrap: str, way: str, set_to_none: bool) -> Any:
    runs = [run_ranks(_use, 2, wrap, way, set_to_none) for _ in range(REPEATS[way])]
    return _memory.least([_memory.greatest([Use(**told) for told in run]) for run in runs])


def _gradients(wrap: str, way: str) -> float:
    """In multiples of the parameters, of the rank that needs more."""
    used = _memory.gradients(_greatest_use(wrap, way, False), _greatest_use(bench_memory.NOT_KEPT, way, True))
    return used / (4 * WIDTH**2)


@pytest.mark.parametrize(
    "way,wrap,expected",
    [
        ("allocator", "ours", 1),
        ("allocator", "keeps a copy", 2),
        ("allocator", "makes a copy", 2),
        ("rss", "ours, gloo", 1),
        ("rss", "keeps a copy", 2),
        ("rss", "makes a copy", 2),
    ],
)
def test_every_copy_of_the_gradients_is_counted(way: str, wrap: str, expected: int) -> None:
    # Transports keep about 2 MiB, 0.06, which only the kernel sees.
    assert _gradients(wrap, way) == pytest.approx(expected, abs=0.01 if way == "allocator" else 0.15)


def test_what_was_held_before_is_subtracted_and_the_constructor_belongs_to_the_first_step() -> None:
    spans = {
        "built": Span(100, 120),
        "wrapped": Span(150, 190),
        "backward 1": Span(160, 175),
        "later 1": Span(150, 170),
        "backward 2": Span(170, 180, 7),
        "later 2": Span(140, 165, 2),
    }

    assert _memory.use_of(spans, 2) == Use(
        backward_peak=80, later_peak=65, first_backward_peak=75, first_later_peak=90, kept=40, allocations=9
    )


def _made_use(backward: int, later: int, first_backward: int = 0, first_later: int = 0) -> Any:
    return Use(backward, later, first_backward, first_later, kept=30, allocations=3)


def test_gradients_are_the_worse_of_backward_beyond_activations_and_of_what_comes_later() -> None:
    without = _made_use(50, 0, 40)

    assert _memory.gradients(_made_use(80, 20), without) == 30
    assert _memory.gradients(_made_use(80, 31), without) == 31
    assert _memory.first_gradients(_made_use(0, 0, 80, 20), without) == 40
    assert _memory.first_gradients(_made_use(0, 0, 80, 41), without) == 41


@pytest.mark.parametrize(
    "exact,rss,said",
    [
        (1.05, 1.1, "met"),
        (1.06, 1.1, "missed"),
        (1.0, 1.16, "not decided"),
        (1.0, 0.84, "not decided"),
        (1.0, None, "met"),
    ],
)
def test_nothing_is_decided_if_the_two_ways_to_count_disagree(exact: float, rss: float | None, said: str) -> None:
    figures = {"gradients_ratio": exact, **({} if rss is None else {"rss_gradients_ratio": rss})}

    assert bench_memory.verdict(figures) == said
