"""A buffer that one rank alone registers, or drops, during training is told in the next call, with its name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LayoutError, LegacyDistributedDataParallel, all_reduce_gradients
from legacy_ddp.debug import check_replicas
from tests.helpers import logged_warnings
from tests.helpers.shared_jobs import on_ranks, run_cases

_STEP = 4  # of the registration
_ALL = (0, 1)


class _Gate(nn.Module):
    """Registers a buffer in the first forward after it was opened."""

    def __init__(self) -> None:
        super().__init__()
        self.open_as: dict[str, Any] | None = None
        self.register_buffer("reserved", None)
        self.register_buffer("bias", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.open_as is not None:
            self.register_buffer(tensor=torch.ones(1), **self.open_as)
            self.open_as = None
        return inputs


def _register(gate: _Gate) -> None:
    gate.open_as = {"name": "routing"}


def _register_unsaved(gate: _Gate) -> None:
    gate.open_as = {"name": "routing", "persistent": False}


def _fill_reserved(gate: Any) -> None:
    gate.reserved = torch.ones(1)


def _drop(gate: Any) -> None:
    gate.bias = None


def _add_module(gate: _Gate) -> None:
    gate.add_module("meter", nn.BatchNorm1d(1, affine=False))


def _alias(gate: Any) -> None:
    gate.register_buffer("again", gate.bias)


_CHANGES: dict[str, tuple[Callable[[Any], None], dict[str, str]]] = {
    "registered": (_register, {"0.routing": "rank 1 has it; rank 0 has nothing"}),
    "not saved": (_register_unsaved, {"0.routing": "rank 1 has it; rank 0 has nothing"}),
    "None before": (_fill_reserved, {"0.reserved": "rank 1 has it; rank 0 has nothing"}),
    "dropped": (_drop, {"0.bias": "rank 1 has nothing; rank 0 has it"}),
    "in a module": (_add_module, {"0.meter.running_var": "rank 1 has it; rank 0 has nothing"}),
    "a second name": (_alias, {"0.again": "rank 1 has it; rank 0 has nothing"}),
}
_RAISE = Checks(divergence="raise")


def _train(
    rank: int, change: Callable[[Any], None] | None, checks: Any, ranks: tuple[int, ...] = (1,), **arguments: Any
) -> list[str]:
    """The warnings and the error of a training, each with the number of its step."""
    gate = _Gate()
    model = LegacyDistributedDataParallel(nn.Sequential(gate, nn.Linear(2, 1)), checks=checks, **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    said = []
    for step in range(_STEP + 20):
        if step == _STEP and change is not None and rank in ranks:
            change(gate)
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
    levels = {"info": "info", "detail": "detail", "every": Checks("detail", every=7), "raise": _RAISE}
    cases: dict[str, Any] = {
        f"{name}, {level}": (change, checks)
        for name, (change, _) in _CHANGES.items()
        for level, checks in levels.items()
        if level == "info" or name in ("registered", "not saved")
    }

    for case, (first, second) in run_cases(_train, 2, cases).items():
        name, level = case.split(", ")
        kind, call = "warning" if level == "info" else "error", f"all_reduce() call {_STEP + 1}"
        assert first == second
        assert len(first) == 1, (case, first)
        assert first[0].startswith(f"{_STEP} {kind}: {call}: ranks hold different buffers:\n"), case
        assert all(f"\n  buffer {buffer!r}: {sides}\n" in first[0] for buffer, sides in _CHANGES[name][1].items()), case


def _train_twice(rank: int, checks: Any) -> list[str]:
    """A second buffer after the first."""
    return _train(rank, _register_again, checks)


def _register_again(gate: _Gate) -> None:
    _register(gate)
    gate.register_forward_hook(_register_in_hook)


def _register_in_hook(gate: Any, *_: object) -> None:
    if not hasattr(gate, "later") and hasattr(gate, "routing"):
        gate.count = getattr(gate, "count", 0) + 1
        if gate.count == 3:
            gate.register_buffer("later", torch.ones(1))


def test_a_second_buffer_is_told_as_well() -> None:
    first, second = run_cases(_train_twice, 2, {"": ("info",)})[""]

    assert first == second
    assert [text.split(":")[0] for text in first] == [f"{_STEP} warning", f"{_STEP + 2} warning"]
    assert "buffer '0.later': rank 1 has it; rank 0 has nothing" in first[1]
    assert "routing" not in first[1]


_SILENT: dict[str, tuple[Any, ...]] = {
    "nothing": (None, "info"),
    **{f"{name} on all ranks, info": (change, "info", _ALL) for name, (change, _) in _CHANGES.items()},
    **{f"{name} on all ranks, detail": (change, "detail", _ALL) for name, (change, _) in _CHANGES.items()},
    "named as local": (_register, Checks(local_buffers=["*.routing"])),
    "named as local, detail": (_register, Checks("detail", local_buffers=["*.routing"])),
    "divergence is ignored": (_register, Checks(divergence="ignore")),
    "checks are off": (_register, "off"),
}


def test_buffers_of_all_ranks_and_buffers_named_as_local_are_silent() -> None:
    assert run_cases(_train, 2, _SILENT) == {name: [[], []] for name in _SILENT}


def test_a_rank_without_checks_is_no_reason_to_wait_for_it() -> None:
    assert run_cases(_train_mixed, 2, {"": ()})[""] == [[], []]


def _train_mixed(rank: int) -> list[str]:
    return _train(rank, _register, "off" if rank == 0 else "info")


@on_ranks(2)
def _unlike(rank: int) -> tuple[str, str, list[str]]:
    """What check_replicas() says of a buffer on one rank and of one with another shape."""
    model = LegacyDistributedDataParallel(nn.BatchNorm1d(2), checks="off")
    if rank == 1:
        model.module.register_buffer("routing", torch.ones(2))
    missing = check_replicas(model)
    if rank == 1:
        del model.module.routing
        model.module.running_var = torch.ones(3)
    resized = check_replicas(model)
    errors = []
    for report in (missing, resized):
        assert not report.identical
    with pytest.raises(LayoutError):
        model.broadcast_buffers()
    try:
        check_replicas(model, raises=True)
    except Exception as error:  # noqa: BLE001 - the test looks at its text
        errors.append(str(error))
    return str(missing), str(resized), errors


def test_a_broadcast_is_not_advised_where_it_would_raise() -> None:
    for missing, resized, errors in _unlike():
        assert "ranks do not hold the same: buffer 'routing'" in " ".join(missing.split())
        assert "ranks do not hold the same: buffer 'running_var'" in " ".join(resized.split())
        assert not any("broadcast_buffers" in text for text in (missing, resized, *errors))
        assert all("a broadcast raises LayoutError" in text for text in errors)


@on_ranks(2, [[]] * 2)
def test_the_function_compares_no_buffers(rank: int) -> list[str]:
    module = nn.Linear(2, 1)
    if rank == 1:
        module.register_buffer("routing", torch.ones(1))
    module(torch.ones(1, 2) * rank).sum().backward()
    all_reduce_gradients(module)
    return logged_warnings.take()
