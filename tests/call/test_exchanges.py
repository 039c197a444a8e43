"""The exchanges of every operation: how many, of which kind, in which order.

A further exchange costs every rank a wait. An exchange that only some ranks start leaves the other ranks waiting
for ever. So the table holds every exchange of this rank, and is the same on all ranks.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, all_reduce_gradients
from legacy_ddp.debug import check_replicas
from tests.helpers import logged_warnings
from tests.helpers.outcomes import attempt, backward, kinds_of, small_net
from tests.helpers.ranks import run_ranks

Kinds = list[str]


def _model(*, calls: int = 2, checks: Any = None, net: Any = None, **settings: Any) -> LegacyDistributedDataParallel:
    """A wrapper after ``calls`` calls, with gradients for the next one."""
    model = LegacyDistributedDataParallel(net or small_net(), checks=checks or Checks(), **settings)
    arguments = {"sample_size": 1} if settings.get("reproducible") else {}
    for _ in range(calls):
        _step(model)
        model.all_reduce(**arguments)
    _step(model)
    return model


def _step(model: nn.Module, value: float = 1.0) -> None:
    model.zero_grad()
    backward(model, value)


def _failing(action: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        assert attempt(action) is not None

    return run


def _call(model: LegacyDistributedDataParallel) -> None:
    _step(model)
    model.all_reduce()


def _with_buffer() -> nn.Module:
    net = small_net()
    net.register_buffer("offset", torch.ones(2))
    return net


class _WithStatistic(nn.Module):
    """Its buffer changes in every forward, on each rank to another value."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.layer = rank, nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        self.seen += 1.0 + self.rank
        return self.layer(batch)


class _TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.wide(self.narrow(batch).to(torch.float64))


def _operations(rank: int) -> Iterator[tuple[str, Kinds]]:
    yield "first construction", kinds_of(lambda: LegacyDistributedDataParallel(small_net()))
    yield "construction", kinds_of(lambda: LegacyDistributedDataParallel(small_net()))
    yield "construction with buffers", kinds_of(lambda: LegacyDistributedDataParallel(_with_buffer()))
    model = _model(calls=0)
    yield "first call", kinds_of(model.all_reduce)
    _step(model)
    yield "second call", kinds_of(model.all_reduce)
    for level in ("off", "info", "detail"):
        yield f"warm call, {level}", kinds_of(_model(checks=Checks(level)).all_reduce)
    yield "two dtypes", kinds_of(_model(net=_TwoDtypes()).all_reduce)
    yield "sample_size", kinds_of(partial(_model().all_reduce, 2))
    yield "metrics", kinds_of(partial(_model().all_reduce, metrics={"loss": 1.0, "items": 2.0}))
    yield "skip on one rank", kinds_of(partial(_model().all_reduce, skip=rank == 1))
    yield "skip on all ranks", kinds_of(partial(_model().all_reduce, skip=True))
    yield "reproducible", kinds_of(partial(_model(reproducible=True).all_reduce, 1))
    yield "parameters without a wrapper", kinds_of(partial(all_reduce_gradients, _reduced_net()))
    yield "broadcast_parameters", kinds_of(_model().broadcast_parameters)
    yield "broadcast_buffers", kinds_of(_model(net=_with_buffer()).broadcast_buffers)
    yield "broadcast_buffers without buffers", kinds_of(_model().broadcast_buffers)
    yield "check_replicas", kinds_of(partial(check_replicas, _model()))
    model = _model(calls=32, net=_WithStatistic(rank))
    yield "16 calls with a known statistic", [kind for _ in range(16) for kind in kinds_of(partial(_call, model))]
    yield from _with_nonfinite_values(rank)
    yield from _with_mismatches(rank)
    yield "join", kinds_of(partial(_train_joined, _model(), 1 + rank))


def _reduced_net() -> nn.Module:
    """A module without a wrapper, after a call, with new gradients."""
    net = small_net()
    for _ in range(2):
        _step(net)
        all_reduce_gradients(net)
    _step(net)
    return net


def _with_nonfinite_values(rank: int) -> Iterator[tuple[str, Kinds]]:
    model = _model()
    for name in ("the first NaN on one rank", "the second NaN in a row"):
        _step(model, float("nan") if rank == 1 else 1.0)
        yield name, kinds_of(model.all_reduce)
    logged_warnings.take()
    for policy in ("ignore", "raise"):
        model = _model(checks=Checks(nonfinite=policy))
        _step(model, float("nan") if rank == 1 else 1.0)
        call = model.all_reduce if policy == "ignore" else _failing(model.all_reduce)
        yield f"NaN on one rank, {policy}", kinds_of(call)


def _with_mismatches(rank: int) -> Iterator[tuple[str, Kinds]]:
    model = _model()
    yield "failed rank", kinds_of(_failing(partial(model.all_reduce, skip="no" if rank == 1 else False)))
    yield "other call", kinds_of(_failing(model.broadcast_buffers if rank == 1 else model.all_reduce))
    yield "mixed", kinds_of(_failing(partial(model.all_reduce, 2 if rank == 1 else None)))
    yield "metrics of other names", kinds_of(_failing(partial(model.all_reduce, metrics={f"loss {rank}": 1.0})))
    yield "the call after them", kinds_of(model.all_reduce)
    frozen = _model()
    frozen.module[1].bias.requires_grad_(rank == 0)
    yield "layout", kinds_of(_failing(frozen.all_reduce))
    for checks in (Checks("detail"), Checks(divergence="raise")):
        moved = _model(calls=0, checks=checks)
        moved.all_reduce()
        with torch.no_grad():
            moved.module[0].bias[0] += rank
        _step(moved)
        yield f"diverged replicas, {checks.level}", kinds_of(_failing(moved.all_reduce))
    yield "check_replicas of diverged replicas", kinds_of(partial(check_replicas, moved))


def _train_joined(model: LegacyDistributedDataParallel, steps: int) -> None:
    with model.join():
        for _ in range(steps):
            _call(model)


# On two ranks of one host: with the memory of the host, and with gloo where that differs. "2 row" are two in a row.
# The constructor compares the layout, broadcasts parameters, and then buffers. Texts of the ranks are a row of
# fingerprints, and a row of all distinct texts if there are several: so is what surrounds a call that differs. The gloo
# group begins with an allreduce. The first call compares the names of buffers.
_EXPECTED = {
    "first construction": ("row, allreduce, 4 row, broadcast, row",),
    "construction": ("2 row, broadcast, row",),
    "construction with buffers": ("2 row, broadcast, row, broadcast",),
    "first call": ("2 row, memory, row, barrier", "2 row, allreduce"),
    "second call": ("row, barrier", "row, allreduce"),
    "warm call, off": ("row, barrier", "row, allreduce"),
    "warm call, info": ("row, barrier", "row, allreduce"),
    "warm call, detail": ("row, barrier", "row, allreduce"),
    "two dtypes": ("row, barrier", "row, 2 allreduce"),
    "sample_size": ("row, barrier", "row, allreduce"),
    "metrics": ("2 row, barrier", "2 row, allreduce"),
    "skip on one rank": ("2 row, 2 barrier", "2 row, allreduce"),
    "skip on all ranks": ("row",),
    "reproducible": ("row, barrier", "row, 2 alltoall_base, 2 broadcast"),
    "parameters without a wrapper": ("row, barrier", "row, allreduce"),
    "broadcast_parameters": ("row, broadcast",),
    "broadcast_buffers": ("row, broadcast",),
    "broadcast_buffers without buffers": ("row",),
    "check_replicas": ("row",),
    "16 calls with a known statistic": (", ".join(["row, barrier"] * 16), ", ".join(["row, allreduce"] * 16)),
    "the first NaN on one rank": ("3 row, barrier", "3 row, allreduce"),
    "the second NaN in a row": ("row, barrier", "row, allreduce"),
    "NaN on one rank, ignore": ("row, barrier", "row, allreduce"),
    "NaN on one rank, raise": ("3 row",),
    "failed rank": ("3 row",),
    "other call": ("3 row",),
    "mixed": ("2 row",),
    "metrics of other names": ("4 row",),
    "the call after them": ("row, barrier", "row, allreduce"),
    "layout": ("4 row",),
    "diverged replicas, detail": ("9 row, broadcast, 3 row",),
    "diverged replicas, info": ("7 row, broadcast, 4 row",),
    "check_replicas of diverged replicas": ("5 row, broadcast, 2 row",),
    # Rank 0 makes one call, rank 1 two; the last rank then broadcasts parameters, and looks for buffers.
    "join": (
        "row, barrier, 2 row, 2 barrier, row, broadcast, row",
        "row, allreduce, 2 row, allreduce, row, broadcast, row",
    ),
}


def _play(rank: int) -> dict[str, str]:
    return {name: _tally(kinds) for name, kinds in _operations(rank)}


def _tally(kinds: Kinds) -> str:
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    return ", ".join(kind if count == 1 else f"{count} {kind}" for kind, count in runs)


def test_every_operation_makes_the_same_few_exchanges_on_all_ranks(transport: str) -> None:
    expected = {name: texts[0 if transport == "host" else -1] for name, texts in _EXPECTED.items()}
    assert run_ranks(_play, 2) == [expected] * 2
