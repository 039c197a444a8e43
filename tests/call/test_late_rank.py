"""The parts of a step, and the rank for which the others wait, as the log of rank 0 tells them."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, RankRow, all_reduce_gradients
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import run_cases

_LATE_SECONDS = 0.015  # in a hundred calls far more than a busy machine takes from one of the ranks
_PARTS = ("data", "forward", "backward")


@contextmanager
def _at_info() -> Iterator[list[logging.LogRecord]]:
    logger, handler, found = logging.getLogger("legacy_ddp"), logging.Handler(), list[logging.LogRecord]()
    handler.emit = found.append  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        yield found
    finally:
        logger.setLevel(logging.NOTSET)
        logger.removeHandler(handler)


class _Slow(nn.Module):
    """A layer whose forward and whose backward may take longer.

    The parameter with the first name is next to the output: its gradient is the first of a backward.
    """

    def __init__(self, wait: dict[str, float]) -> None:
        super().__init__()
        self.a_last, self.b_first = nn.Linear(4, 1), nn.Linear(2, 4)
        self._wait = wait

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(self._wait.get("forward", 0.0))
        hidden = self.b_first(inputs)
        hidden.register_hook(lambda _: time.sleep(self._wait.get("backward", 0.0)))
        return self.a_last(hidden)  # type: ignore[no-any-return]


def _train(rank: int, part: str, checks: str) -> list[Any]:
    """Train for 101 steps, of which rank 1 is late in this part; the log records about late ranks."""
    wait = {part: _LATE_SECONDS} if rank == 1 else {}
    model = LegacyDistributedDataParallel(_Slow(wait), checks=checks)
    with _at_info() as found:
        for _ in range(101):
            time.sleep(wait.get("data", 0.0))
            model(torch.full((1, 2), rank + 1.0)).sum().backward()
            model.all_reduce()
    return [
        (
            *(getattr(record, name) for name in ("rank", "levelname", "call", "ranks", "phase")),
            getattr(record, "seconds", 0.0) > 0,
            record.getMessage(),
        )
        for record in found
        if getattr(record, "event", None) == "late_rank"
    ]


@pytest.mark.parametrize("transport", ["host"], indirect=True)  # on a device the host does not wait
def test_the_log_of_rank_0_names_the_late_rank_and_the_part_of_its_step(transport: str) -> None:
    found = run_cases(_train, 3, {"checks off": ("data", "off"), **{part: (part, "info") for part in _PARTS}})

    for part in _PARTS:
        told, *others = found[part]
        assert others == [[], []]
        ((rank, level, call, ranks, phase, has_seconds, text),) = told
        assert (rank, level, call, ranks, phase) == (0, "INFO", "all_reduce() call 101", [1], part), text
        assert has_seconds
        assert text.startswith("all_reduce() call 101: the other ranks waited for rank 1 in ")
    assert found["checks off"] == [[], [], []]


def _late_twice(rank: int) -> list[Any]:
    """Rank 0 is late in the first call, and rank 1 in the broadcast behind it."""
    model = LegacyDistributedDataParallel(nn.Linear(2, 1))
    found = []
    for call in range(2):
        time.sleep(0.3 if (rank, call) == (0, 0) else 0.0)
        model(torch.full((1, 2), rank + 1.0)).sum().backward()
        found.append(model.all_reduce().straggler)
        time.sleep(0.6 if (rank, call) == (1, 0) else 0.0)
        model.broadcast_buffers()
    return found


def test_a_broadcast_between_two_calls_does_not_hide_who_was_late_in_the_first() -> None:
    (first, second), *others = run_ranks(_late_twice, 3)

    assert others == [[first, second]] * 2
    assert first is None
    assert second[0] == 0


# Parts of a step


def _spend(seconds: float) -> None:
    end = perf_counter() + seconds
    while perf_counter() < end:
        pass


def _parts(row: RankRow) -> tuple[float, float, float]:
    return row.data_seconds, row.forward_seconds, row.backward_seconds


@pytest.mark.usefixtures("alone")
@pytest.mark.cpu("the host waits where a device does")
def test_every_second_of_a_step_counts_in_one_part() -> None:
    """The parts have at least the seconds that were spent in them, and together no more than the step has."""
    wait: dict[str, float] = {}
    model = LegacyDistributedDataParallel(_Slow(wait))
    model(torch.ones(1, 2)).sum().backward()
    begin = perf_counter()  # the step begins inside of this call
    model.all_reduce()
    wait.update(forward=0.02, backward=0.03)
    for _ in range(2):  # two micro-batches
        _spend(0.01)
        loss = model(torch.ones(1, 2)).sum()
        _spend(0.005)
        loss.backward()
        _spend(0.002)  # after the last gradient
    record = model.all_reduce()
    total = perf_counter() - begin

    data, forward, backward = _parts(record.rows[0])
    assert data >= 2 * (0.01 + 0.002) - 1e-5
    assert forward >= 2 * 0.02 - 1e-5
    assert backward >= 2 * (0.005 + 0.03) - 1e-5
    assert data + forward + backward <= total


@pytest.mark.usefixtures("alone")
def test_a_nested_forward_and_a_failed_forward_count_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.outer: LegacyDistributedDataParallel | None = None
            self.depth = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.depth += 1
            if self.depth == 3:
                raise RuntimeError("planned")
            _spend(0.01)
            found = self.layer(inputs) if self.depth == 2 or self.outer is None else self.outer(inputs)
            self.depth -= 1
            return found  # type: ignore[no-any-return]

    module = Twice()
    model = LegacyDistributedDataParallel(module)
    object.__setattr__(module, "outer", model)  # no submodule
    model(torch.ones(1, 2)).sum().backward()
    begin = perf_counter()  # the step begins inside of this call
    model.all_reduce()
    model(torch.ones(1, 2)).sum().backward()
    module.depth = 2
    with pytest.raises(RuntimeError, match="planned"):
        model(torch.ones(1, 2))
    row = model.all_reduce().rows[0]

    assert sum(_parts(row)) <= perf_counter() - begin
    assert row.forward_seconds >= 0.01 - 1e-5


@pytest.mark.usefixtures("alone")
def test_without_a_forward_of_the_wrapper_its_time_is_not_known() -> None:
    module = nn.Linear(2, 1)
    for _ in range(2):
        _spend(0.002)
        module(torch.ones(1, 2)).sum().backward()
        row = all_reduce_gradients(module).rows[0]
        module.zero_grad()
    off = LegacyDistributedDataParallel(nn.Linear(2, 1), checks=Checks("off"))
    off(torch.ones(1, 2)).sum().backward()

    assert row.forward_seconds == 0
    assert row.backward_seconds >= 0.002 - 1e-5
    assert _parts(off.all_reduce().rows[0]) == (0, 0, 0)
