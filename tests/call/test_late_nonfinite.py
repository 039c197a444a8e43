"""Non-finite gradients on a device, told some calls later: on all ranks in the same call, and without a wait."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp.debug import check_replicas
from tests.helpers import logged_warnings
from tests.helpers.outcomes import attempt
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import fork_ranks
from tests.helpers.simulated_device import device
from tests.helpers.simulated_group import new_group
from tests.helpers.torch_versions import needs_simulation

# The groups are those of the device, whatever the transport.
pytestmark = [needs_simulation, pytest.mark.parametrize("transport", ["host"], indirect=True)]
NAN, INF = float("nan"), float("inf")
DTYPES = {"a": torch.float32, "b": torch.float32, "bf": torch.bfloat16, "wide": torch.float64, "z": torch.complex64}


class _Loop:
    """Calls with gradients of ones, in which chosen gradients of rank 1 have a value that is not 1.

    ``calls``: attempts. ``told``: by attempt, the warnings that it gave. ``waits``: of the host, by attempt.
    """

    def __init__(self, group: Any, rank: int, **settings: Any) -> None:
        settings.setdefault("checks", Checks(uneven="raise"))
        parameters = {name: nn.Parameter(torch.ones(2, dtype=dtype)) for name, dtype in DTYPES.items()}
        module = nn.ParameterDict({**parameters, "empty": nn.Parameter(torch.ones(0))}).to("sim")
        self.model = LegacyDistributedDataParallel(module, process_group=group, **settings)
        self.rank = rank
        self.calls = 0
        self.told: dict[int, str] = {}
        self.waits: dict[int, int] = {}
        self.errors: list[str] = []

    def call(self, bad: dict[str, float] | None = None, **arguments: Any) -> None:
        for name, parameter in self.model.module.items():
            value = (bad or {}).get(name, 1.0) if self.rank == 1 else 1.0
            grad = torch.ones_like(parameter)
            grad[-1:] = value
            parameter.grad = grad
        self.calls += 1
        self.note(lambda: self.model.all_reduce(**arguments))

    def note(self, action: Callable[[], object]) -> None:
        device.host_waits.clear()
        if error := attempt(action):
            self.errors.append(str(error).split(":")[0])
        if waits := sum(count for place, count in device.host_waits.items() if place):
            self.waits[self.calls] = waits
        if texts := logged_warnings.take():
            self.told[self.calls] = "\n".join(texts)

    @property
    def found(self) -> tuple[dict[int, str], dict[int, int], list[str]]:
        return self.told, self.waits, self.errors


PLAIN: dict[str, list[dict[str, float] | None]] = {  # the gradients of each call
    "next call": [None, {"b": NAN}, None, None],
    "many dtypes": [{"bf": INF, "wide": NAN, "z": NAN}, None],
    "every gradient": [dict.fromkeys(DTYPES, NAN), None],
    "streaks": [{"a": NAN}, {"b": NAN}, None, {"a": INF}, None, None],
    "finite": [{"a": 3e38, "wide": 1e300}] * 3,
}


def _runs(rank: int) -> dict[str, tuple[dict[int, str], dict[int, int], list[str]]]:
    """What each loop told, in which calls it waited, and its errors."""
    group, found = new_group(), {}

    def loop(name: str, **settings: Any) -> _Loop:
        made = _Loop(group, rank, **settings)
        found[name] = made.found
        return made

    for name, gradients in PLAIN.items():
        of = loop(name, **({"reduce_dtype": torch.float32} if name == "finite" else {}))
        for bad in gradients:
            of.call(bad)

    of = loop("no part")
    of.call({"a": NAN}, sample_size=4 * (1 - rank))
    of.call(sample_size=4)

    of = loop("in tree order", reproducible=True)
    of.call({"a": NAN}, sample_size=4)
    of.call(sample_size=4)

    of = loop("slow on rank 1")
    for number in range(1, 8):
        device.holds_copies = rank == 1 and number < 5
        of.call({"a": NAN} if number == 2 else {"b": NAN} if number == 3 else None)

    of = loop("full ring")
    for number in range(1, 12):
        device.holds_copies = rank == 1
        of.call({"a": NAN} if number == 1 else None)
    device.holds_copies = False
    device.run_copies()

    of = loop("after an error")
    device.holds_copies = True
    of.call()
    of.call({"a": NAN}, sample_size=None if rank else 4)  # call 2 fails, and its row is dropped
    of.call()  # call 2 again
    device.holds_copies = False
    device.run_copies()
    of.call({"b": NAN})
    of.call()

    of = loop("check_replicas")
    device.holds_copies = True
    of.call({"a": NAN})
    of.calls = 0
    of.note(lambda: check_replicas(of.model, what=("rng",)))
    device.holds_copies = False
    of.calls = 2
    of.note(lambda: check_replicas(of.model, what=("rng",)))

    of = loop("ignored on rank 0", checks=Checks(nonfinite="ignore" if rank == 0 else "warn"))
    of.call({"a": NAN})
    of.call()
    of.call()

    of = loop("a device without the operation")
    device.lacks = {"aten::linalg_vector_norm"} if rank == 1 else set()
    of.call({"a": NAN})
    of.call()
    device.lacks = set()

    of = loop("end of a join")  # last: torch's Join changes the filter of warnings
    with of.model.join():
        for number in range(1 + rank):
            of.call({"a": NAN} if number else None)
    of.calls = 0
    of.note(lambda: None)
    return found


def _headline(bad_call: int, found_in: str) -> str:
    return f"all_reduce() call {bad_call}: non-finite gradients, found in {found_in}, when the device had told them:"


EVERY = {  # by loop: by the attempt that tells, the headline and a line of the text
    "next call": {3: (_headline(2, "all_reduce() call 3"), "rank 1: 'b'\nevery rank has got them (warned once")},
    "many dtypes": {2: (_headline(1, "all_reduce() call 2"), "rank 1: 'z'; 'bf'; 'wide'\n")},
    "every gradient": {2: (_headline(1, "all_reduce() call 2"), "rank 1: every gradient (5 of 5 parameters): look at")},
    "streaks": {
        2: (_headline(1, "all_reduce() call 2"), "rank 1: 'a'\n"),
        5: (_headline(4, "all_reduce() call 5"), "rank 1: 'a'\n"),
    },
    "finite": {},
    "no part": {},
    "in tree order": {2: (_headline(1, "all_reduce() call 2"), "rank 1: 'a'\n")},
    # In call 5 the copies of all rows run before the search: with the copy of the digest.
    "slow on rank 1": {5: (_headline(2, "all_reduce() call 5"), "rank 1: 'a'\n")},
    "full ring": {9: (_headline(1, "all_reduce() call 9"), "rank 1: 'a'\n")},
    "after an error": {5: (_headline(3, "all_reduce() call 4"), "rank 1: 'b'\n")},
    "check_replicas": {0: (_headline(1, "check_replicas() call 1"), "rank 1: 'a'\n")},
    "ignored on rank 0": {},
    "end of a join": {0: (_headline(2, "broadcast_parameters() call 2"), "rank 1: 'a'\n")},
}


def test_a_nan_on_a_device_is_told_later_by_all_ranks_in_the_same_call_without_a_wait(transport: str) -> None:
    results = run_ranks(_runs, 2, fresh=True)

    for rank, found in enumerate(results):
        unable, _, _ = found.pop("a device without the operation")
        assert [*unable] == ([1] if rank == 1 else [])
        assert "cannot be searched for NaN and infinity" in unable.get(1, "cannot be searched for NaN and infinity")
        assert [*found] == [*EVERY]
        for name, (told, _, errors) in found.items():
            assert [*told] == [*EVERY[name]], (name, told)
            for call, (headline, line) in EVERY[name].items():
                assert told[call].startswith(headline), (name, told[call])
                assert line in told[call].replace("\n  ", "\n"), (name, told[call])
            assert errors == (["all_reduce() call 2"] if name == "after an error" else []), name
        waits = {name: waits for name, (_, waits, _) in found.items() if waits}
        assert waits.pop("check_replicas") == {0: 1}
        assert waits == ({"full ring": {9: 1}} if rank == 1 else {})


_ENDS = """
import logging, torch, torch.distributed as dist
from torch import nn
from tests.helpers.simulated_group import register
from legacy_ddp import Checks, LegacyDistributedDataParallel

class Scaler:
    is_enabled, get_scale = lambda self: True, lambda self: 128.0

register()
dist.init_process_group("cpu:gloo,sim:simccl")
scaled = Checks(grad_scaler=Scaler())  # which skips such a step
models = [
    LegacyDistributedDataParallel(nn.Linear(1, 1, bias=False).to("sim"), checks=checks) for checks in (scaled, "info")
]
for model, calls in zip(models, (3, 2)):  # Python shows a warning with the same text once
    for step in range(calls):
        value = float("nan") if (dist.get_rank(), step) == (1, calls - 1) else 1.0
        model(torch.full((1, 1), value, device="sim")).sum().backward()
        model.all_reduce()
        model.zero_grad()
dist.destroy_process_group()
print("end of rank", dist.get_rank() if dist.is_initialized() else "")
"""


def test_a_nan_in_the_last_call_is_told_by_its_rank_as_the_process_ends(transport: str) -> None:
    run = fork_ranks(2, "-c", _ENDS)

    assert run.returncode == 0, run.stderr
    text = "all_reduce() call 2: non-finite gradients on rank 1, found after its last call:\n  'weight'"
    assert run.stderr.count(text) == run.stderr.count("non-finite") == 1, run.stderr
