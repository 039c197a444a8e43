"""A buffer that one rank alone registers, or drops, during training is told in the next call, with its name."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LayoutError, LegacyDDPError, LegacyDistributedDataParallel, all_reduce_gradients
from legacy_ddp.debug import check_replicas
from tests.helpers import logged_warnings
from tests.helpers.shared_jobs import on_ranks, run_cases

_STEP = 4  # of the registration


class _Gate(nn.Module):
    """Registers a buffer in the first forward after it was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open_as: dict[str, Any] | None = None
        self.register_buffer("reserved", None)
        self.register_buffer("bias", torch.zeros(1))

    def open(self, **arguments: Any) -> None:
        self.open_as = arguments

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.open_as is not None:
            self.register_buffer(tensor=torch.ones(1), **self.open_as)
            self.open_as = None
        return inputs


_IT, _NOTHING = "rank 1 has it; rank 0 has nothing", "rank 1 has nothing; rank 0 has it"
# What happens, the name of the buffer, and who has it then.
_CHANGES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "registered": (lambda gate: gate.open(name="routing"), "0.routing", _IT),
    "not saved": (lambda gate: gate.open(name="routing", persistent=False), "0.routing", _IT),
    "None before": (lambda gate: setattr(gate, "reserved", torch.ones(1)), "0.reserved", _IT),
    "dropped": (lambda gate: setattr(gate, "bias", None), "0.bias", _NOTHING),
    "in a module": (lambda gate: gate.add_module("meter", nn.BatchNorm1d(1, affine=False)), "0.meter.running_var", _IT),
    "a second name": (lambda gate: gate.register_buffer("again", gate.bias), "0.again", _IT),
}


def _register_twice(gate: _Gate) -> None:
    """A buffer in the next forward, and another one two steps later."""
    forwards = count()

    def register(*_: object) -> None:
        if next(forwards) == 2:
            gate.register_buffer("later", torch.ones(1))

    gate.open(name="routing")
    gate.register_forward_hook(register)


_ACTS = {"nothing": id, "twice": _register_twice, **{name: act for name, (act, _, _) in _CHANGES.items()}}


def _train(rank: int, change: str, checks: Any, ranks: tuple[int, ...] = (1,)) -> list[str]:
    """The warnings and the error of a training, each with the number of its step. ``checks``: also a tuple, by rank."""
    gate = _Gate()
    own = checks[rank] if isinstance(checks, tuple) else checks
    model = LegacyDistributedDataParallel(nn.Sequential(gate, nn.Linear(2, 1)), checks=own)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    said = []
    for step in range(_STEP + 17):  # a rotation of digests takes 16 calls
        if step == _STEP and rank in ranks:
            _ACTS[change](gate)
        optimizer.zero_grad()
        model(torch.tensor([[1.0, rank]])).sum().backward()
        try:
            model.all_reduce()
        except LayoutError as error:
            return [*said, f"{step} error: {error}"]
        said += [f"{step} warning: {text}" for text in logged_warnings.take()]
        optimizer.step()
    return said


def test_a_buffer_of_one_rank_alone_is_told_in_the_next_call() -> None:
    levels = {
        "info": "info",
        "detail": "detail",
        "every": Checks("detail", every=7),
        "raise": Checks(divergence="raise"),
    }
    cases: dict[str, Any] = {
        f"{name}, {level}": (name, checks)
        for name in _CHANGES
        for level, checks in levels.items()
        if level == "info" or name in ("registered", "not saved")
    }

    for case, (first, second) in run_cases(_train, 2, cases).items():
        name, level = case.split(", ")
        _, buffer, sides = _CHANGES[name]
        kind, call = "warning" if level == "info" else "error", f"all_reduce() call {_STEP + 1}"
        assert first == second
        assert len(first) == 1, (case, first)
        assert first[0].startswith(f"{_STEP} {kind}: {call}: ranks hold different buffers:\n"), case
        assert f"\n  buffer {buffer!r}: {sides}\n" in first[0], case


def test_a_second_buffer_is_told_as_well() -> None:
    first, second = run_cases(_train, 2, {"twice": ("twice", "info")})["twice"]

    assert first == second
    assert [text.split(":")[0] for text in first] == [f"{_STEP} warning", f"{_STEP + 2} warning"]
    assert "buffer '0.later': rank 1 has it; rank 0 has nothing" in first[1]
    assert "routing" not in first[1]


_SILENT: dict[str, tuple[Any, ...]] = {
    "nothing": ("nothing", "info"),
    **{f"{name} on all ranks": (name, "info", (0, 1)) for name in _CHANGES},
    "registered on all ranks, detail": ("registered", "detail", (0, 1)),
    "dropped on all ranks, detail": ("dropped", "detail", (0, 1)),
    "named as local": ("registered", Checks(local_buffers=["*.routing"])),
    "named as local, detail": ("registered", Checks("detail", local_buffers=["*.routing"])),
    "divergence is ignored": ("registered", Checks(divergence="ignore")),
    "checks are off": ("registered", "off"),
    "checks are off on a rank": ("registered", ("off", "info")),
}


@pytest.mark.unsimulated("names of buffers are facts of the host, and a device takes minutes")
def test_buffers_of_all_ranks_and_buffers_named_as_local_are_silent() -> None:
    assert run_cases(_train, 2, _SILENT) == {name: [[], []] for name in _SILENT}


@on_ranks(2)
def _unlike(rank: int) -> tuple[str, str, str]:
    """What check_replicas() says of a buffer on one rank and of one with another shape, and its error."""
    model = LegacyDistributedDataParallel(nn.BatchNorm1d(2), checks="off")
    if rank == 1:
        model.module.register_buffer("routing", torch.ones(2))
    missing = check_replicas(model)
    if rank == 1:
        del model.module.routing
        model.module.running_var = torch.ones(3)
    resized = check_replicas(model)
    assert not missing.identical
    with pytest.raises(LayoutError):
        model.broadcast_buffers()
    with pytest.raises(LegacyDDPError) as caught:
        check_replicas(model, raises=True)
    return str(missing), str(resized), str(caught.value)


def test_a_broadcast_is_not_advised_where_it_would_raise() -> None:
    for missing, resized, error in _unlike():
        assert "ranks do not hold the same: buffer 'routing'" in " ".join(missing.split())
        assert "ranks do not hold the same: buffer 'running_var'" in " ".join(resized.split())
        assert not any("broadcast_buffers" in text for text in (missing, resized, error))
        assert "a broadcast raises LayoutError" in error


@on_ranks(2, [[]] * 2)
def test_the_function_compares_no_buffers(rank: int) -> list[str]:
    module = nn.Linear(2, 1)
    if rank == 1:
        module.register_buffer("routing", torch.ones(1))
    module(torch.ones(1, 2) * rank).sum().backward()
    all_reduce_gradients(module)
    return logged_warnings.take()
