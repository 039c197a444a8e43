"""The guard against a model of a few lines, in any order of operations: both refuse the same steps."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, UnsynchronizedStepError
from tests.helpers import logged_warnings

pytestmark = pytest.mark.usefixtures("alone_in_module")

NAMES = ("left", "shared", "right")
HOLDS = (("left", "shared"), ("shared", "right"))  # of two wrappers
Operation = tuple[str, int, str]


@dataclass
class _Parameter:
    """What is known of one parameter: small whole numbers, which floats hold exactly."""

    value: int = 0
    grad: int | None = None
    backward_since_call: dict[int, bool] = field(default_factory=dict)

    def refused(self, local: int | None) -> bool:
        unreduced = all(self.backward_since_call.values()) and local not in self.backward_since_call
        return bool(self.grad) and unreduced

    def note(self, kind: str, wrapper: int, named: bool) -> None:
        watched = wrapper in self.backward_since_call
        if kind == "backward" and named:
            self.grad = (self.grad or 0) + 1
            self.backward_since_call = dict.fromkeys(self.backward_since_call, True)
        elif kind == "assign" and named:
            self.grad = 5
        elif kind in ("call", "skip") and watched:
            self.backward_since_call[wrapper] = False
        if kind == "clear" or (kind == "skip" and watched):
            self.grad = None
        elif kind == "zero" and self.grad is not None:
            self.grad = 0


def _expect(parameters: dict[str, _Parameter], operation: Operation) -> bool:
    """Do ``operation`` on the bookkeeping; whether it is refused."""
    kind, wrapper, name = operation
    for key, parameter in parameters.items():
        parameter.note(kind, wrapper, key == name)
    if not kind.startswith("step"):
        return False
    local = wrapper if kind == "step inside no_sync" else None
    if any(parameter.refused(local) for parameter in parameters.values()):
        return True
    for parameter in parameters.values():
        parameter.value -= parameter.grad or 0
    return False


class _Program:
    def __init__(self) -> None:
        self.parameters = {name: nn.Parameter(torch.zeros(2)) for name in NAMES}
        self.models = [
            LegacyDistributedDataParallel(nn.ParameterDict({name: self.parameters[name] for name in held}))
            for held in HOLDS
        ]
        self.optimizer = torch.optim.SGD(self.parameters.values(), lr=1.0)

    def run(self, operation: Operation) -> None:
        kind, wrapper, name = operation
        model, parameter = self.models[wrapper], self.parameters[name]
        if kind == "backward":
            parameter.sum().backward()
        elif kind == "assign":
            parameter.grad = torch.full((2,), 5.0)
        elif kind == "call":
            model.all_reduce()
        elif kind == "skip":
            model.all_reduce(skip=True)
        elif kind == "failed call":
            with pytest.raises(TypeError):
                model.all_reduce("wrong")  # type: ignore[arg-type]
        elif kind == "call inside no_sync":
            with model.no_sync():
                assert not model.all_reduce().synchronized
        elif kind in ("clear", "zero"):
            self.optimizer.zero_grad(set_to_none=kind == "clear")
        elif kind == "step inside no_sync":
            with model.no_sync():
                self.optimizer.step()
        else:
            self.optimizer.step()

    def state(self) -> dict[str, tuple[list[float], list[float] | None]]:
        return {
            name: (parameter.tolist(), None if parameter.grad is None else parameter.grad.tolist())
            for name, parameter in self.parameters.items()
        }


_KINDS = [
    *["backward", "call", "step"] * 3,
    *["assign", "skip", "failed call", "call inside no_sync", "clear", "zero", "step inside no_sync"],
]
_PROGRAMS = st.lists(
    st.tuples(st.sampled_from(_KINDS), st.sampled_from([0, 1]), st.sampled_from(NAMES)), min_size=3, max_size=25
)


@settings(max_examples=200)
@given(_PROGRAMS)
def test_exactly_the_steps_on_unreduced_gradients_are_refused(operations: list[Operation]) -> None:
    program = _Program()
    expected = {
        name: _Parameter(backward_since_call={index: False for index, held in enumerate(HOLDS) if name in held})
        for name in NAMES
    }
    for operation in operations:
        refused = False
        try:
            program.run(operation)
        except UnsynchronizedStepError:
            refused = True
        assert refused == _expect(expected, operation), operation
        values = {
            name: ([float(p.value)] * 2, None if p.grad is None else [float(p.grad)] * 2)
            for name, p in expected.items()
        }
        assert program.state() == values, operation
    for text in logged_warnings.take():  # some programs step twice without zero_grad()
        assert "backward added to gradients that a step had used already" in text
