"""Replicas on a device that differ, told some calls later: on all ranks in the same call, and without a wait."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers import logged_warnings
from tests.helpers.outcomes import attempt
from tests.helpers.ranks import run_ranks
from tests.helpers.simulated_device import device
from tests.helpers.simulated_group import new_group
from tests.helpers.torch_versions import needs_simulation

pytestmark = [pytest.mark.cpu("the ranks take the simulated device themselves"), needs_simulation]


class _Loop:
    """Calls on a small replica, which is a single part: every call digests all of it.

    ``told``, ``errors``: by attempt, the warnings that it gave, and its error. ``waits``: of the host, in attempts that
    tell nothing, with their forward.
    """

    def __init__(self, group: Any, rank: int, **settings: Any) -> None:
        self.module = nn.Linear(3, 1)
        self.module.register_buffer("table", torch.ones(5, dtype=torch.int16))
        for tensor in self.tensors.values():
            tensor.data.fill_(1)
        self.module.to("sim")
        logged_warnings.listen()
        self.model = LegacyDistributedDataParallel(self.module, process_group=group, **settings)
        self.rank = rank
        self.calls = 0
        self.told: dict[int, str] = {}
        self.waits: dict[int, int] = {}
        self.errors: dict[int, str] = {}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return dict([*self.module.named_parameters(), *self.module.named_buffers()])

    def call(self, **arguments: Any) -> None:
        self.calls += 1
        device.host_waits.clear()
        self.model(torch.ones(2, 3, device="sim")).sum().backward()
        if error := attempt(lambda: self.model.all_reduce(**arguments)):
            self.errors[self.calls] = str(error)
        waits = sum(count for place, count in device.host_waits.items() if place)
        if texts := logged_warnings.take():
            self.told[self.calls] = "\n".join(texts)
        elif waits and not error and self.calls > 1:  # the first forward digests the buffers
            self.waits[self.calls] = waits
        self.model.zero_grad()

    def write(self, name: str = "weight", value: float = 7.0) -> None:
        """A write of rank 1 alone."""
        if self.rank == 1:
            with torch.no_grad():
                self.tensors[name].view(-1)[-1] = value

    def repair(self) -> None:
        self.write(value=1.0)


Action = Callable[[_Loop], object]
_FAULT: dict[int, Action] = {2: _Loop.write}


@dataclass(frozen=True)
class Case:
    """``after``: what happens after a call. ``held_until``: rank 1 holds its copies in the calls before it.
    ``fails``: the call in which only rank 1 has a sample size. ``lacks``: the operations that rank 1 does not have.
    """

    calls: int
    after: Mapping[int, Action] = field(default_factory=dict)
    held_until: int = 0
    fails: int = 0
    lacks: frozenset[str] = frozenset()
    checks: tuple[Any, Any] = ("info", "info")


def _broadcast(loop: _Loop) -> None:
    loop.model.broadcast_parameters()


_RAISES = Checks(divergence="raise", uneven="allow")
_EVERY = Checks("detail", every=3, uneven="allow")
UNABLE = "a device without the operation"
CASES = {
    "equal": Case(20),
    "a parameter": Case(7, _FAULT),
    "a buffer": Case(7, {2: partial(_Loop.write, name="table")}),
    "slow on rank 1": Case(10, _FAULT, held_until=6),
    "full ring": Case(13, _FAULT, held_until=14),
    "repaired by a broadcast": Case(11, {2: _Loop.write, 3: _broadcast, 8: _Loop.write}),
    "before an error of all ranks": Case(8, {2: _Loop.write, 3: _Loop.repair}, fails=4),
    "an error": Case(8, {2: _Loop.write, 5: _Loop.repair}, checks=(_RAISES, _RAISES)),
    "every third call": Case(4, _FAULT, checks=(_EVERY, _EVERY)),
    "off on rank 0": Case(6, _FAULT, checks=("off", "info")),
    UNABLE: Case(6, _FAULT, lacks=frozenset({"aten::bitwise_xor", "aten::bitwise_xor_"})),
}


def _runs(rank: int) -> dict[str, tuple[dict[int, str], dict[int, int], dict[int, str]]]:
    """What each loop told, in which calls it waited, and its errors."""
    group = new_group()
    return {name: _run(rank, group, case) for name, case in CASES.items()}


def _run(rank: int, group: Any, case: Case) -> tuple[dict[int, str], dict[int, int], dict[int, str]]:
    device.lacks = set(case.lacks) if rank == 1 else set()
    loop = _Loop(group, rank, checks=case.checks[rank])
    for number in range(1, case.calls + 1):
        device.holds_copies = rank == 1 and number < case.held_until
        loop.call(sample_size=4 if rank == 1 and number == case.fails else None)
        if number in case.after:
            case.after[number](loop)
    device.holds_copies, device.lacks = False, set()
    device.run_copies()
    return loop.told, loop.waits, loop.errors


def _since(last: int, call: int) -> str:
    return f"since: between the first forward after call {last} and call {call}, as the device has told by this call"


TOLD = {  # by loop: by the attempt that tells, the calls between which the difference came about
    "equal": {},
    "a parameter": {5: _since(1, 3)},
    "a buffer": {5: _since(1, 3)},
    # Rank 1 sees the rows of calls 1 to 6 in call 7. From the next call on, each call compares a row.
    "slow on rank 1": {10: _since(1, 3)},
    "full ring": {12: _since(1, 3)},  # in call 9 rank 1 waits for the rows of calls 1 to 8
    "repaired by a broadcast": {11: _since(7, 9)},
    "before an error of all ranks": {},
    "an error": {},
    "every third call": {},
    "off on rank 0": {},
}


def test_a_difference_on_a_device_is_told_later_by_all_ranks_in_the_same_call_without_a_wait() -> None:
    first, second = run_ranks(_runs, 2, fresh=True)

    of_first, of_second = (found.pop(UNABLE) for found in (first, second))
    assert of_first[0] == {}
    assert [*of_second[0]] == [1]
    assert "replicas on this device cannot be digested (" in of_second[0][1]
    for name, expected in TOLD.items():
        told, waits, errors = first[name]
        assert (told, errors) == (second[name][0], second[name][2]), name
        assert [*told] == [*expected], (name, told)
        tensor = "buffer 'table'" if name == "a buffer" else "parameter 'weight'"
        for call, since in expected.items():
            text = " ".join(told[call].split())
            assert text.startswith(f"all_reduce() call {call}: replicas differ in 1 of "), (name, text)
            assert since in text, (name, text)
            assert tensor in text, (name, text)
        assert waits == {}, name
        assert second[name][1] == ({9: 1} if name == "full ring" else {}), name
    assert [*first["before an error of all ranks"][2]] == [4]
    assert [*first["an error"][2]] == [5]
    assert [*first["every third call"][2]] == [4]
    assert "replicas differ in 1 of 2 parameters" in first["every third call"][2][4]
    assert _since(1, 3) in " ".join(first["an error"][2][5].split())
