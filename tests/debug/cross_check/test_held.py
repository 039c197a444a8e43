"""The values that a function holds besides its arguments: compared by their place, or refused."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from legacy_ddp import LayoutError
from legacy_ddp.debug import cross_check
from tests.helpers.shared_jobs import once, run_cases

SCALE = 0  # another one on each rank


class _Batch(NamedTuple):
    SCALE: torch.Tensor  # the name of an attribute is no global


def _loss(model: Any, batch: _Batch, *_: object) -> torch.Tensor:
    loss: torch.Tensor = model(batch.SCALE).sum()
    return loss


def _with_global(model: Any, batch: _Batch) -> torch.Tensor:
    return _loss(model, batch, SCALE)


def _with_inner_global(model: Any, batch: _Batch) -> torch.Tensor:
    return sum((_loss(model, batch, SCALE) for _ in range(2)), torch.zeros(()))


class _Trainer:
    def __init__(self, value: int) -> None:
        self.scale = value
        self.last_loss = torch.tensor(value)  # no method of a run names it
        self.shift = value

    @property
    def shifted(self) -> int:
        return self.shift

    def run(self, model: Any, batch: _Batch) -> torch.Tensor:
        return _loss(model, batch, self.scale)

    def __call__(self, model: Any, batch: _Batch) -> torch.Tensor:
        return self.run(model, batch) + 0 * self.shifted


def _closure(held: Any) -> Callable[..., torch.Tensor]:
    def run(model: Any, batch: _Batch) -> torch.Tensor:
        return _loss(model, batch, held)

    return run


def _with_defaults(value: int) -> Callable[..., torch.Tensor]:
    def run(model: Any, batch: _Batch, scale: int = value, *, shift: int = value) -> torch.Tensor:
        return _loss(model, batch, scale, shift)

    return run


def _with_arguments(_first: int, model: Any, batch: _Batch, *, second: int) -> torch.Tensor:
    return _loss(model, batch)


def _teacher(value: int) -> nn.Module:
    teacher = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.constant_(teacher[0].weight, value)
    return teacher


# From a value of the rank and the model: the function, and the places of values that differ between ranks.
HELD: dict[str, tuple[Callable[[int, nn.Module], Callable[..., torch.Tensor]], set[str]]] = {
    "nothing": (lambda _value, _model: _loss, set()),
    "a global": (lambda _value, _model: _with_global, {"run variable 'SCALE'"}),
    "a global of an inner function": (lambda _value, _model: _with_inner_global, {"run variable 'SCALE'"}),
    "a tensor": (lambda value, _: _closure(torch.tensor(value)), {"run variable 'held'"}),
    "containers": (lambda value, _: _closure({"a": [value]}), {"run variable 'held'['a'][0]"}),
    "the model": (lambda _, model: _closure(model), set()),
    "a weight of the model": (lambda _, model: _closure(model[0].weight), set()),
    "another module": (lambda value, _: _closure(_teacher(value)), {"run variable 'held'.0.weight"}),
    "a function": (lambda value, _: _closure(_closure(value)), {"run variable 'held' variable 'held'"}),
    "arguments": (
        lambda value, _: partial(_with_arguments, value, second=value),
        {"run argument 0", "run argument 'second'"},
    ),
    "defaults": (lambda value, _: _with_defaults(value), {"run default 0", "run default 'shift'"}),
    "a method": (lambda value, _: _Trainer(value).run, {"run.__self__.scale"}),
    "an object": (lambda value, _: _Trainer(value), {"run.scale", "run.shift"}),
}


def _differing(rank: int, name: str) -> set[str]:
    """Where values of the ranks differ: tensors before any run, other values after a difference of the results."""
    value = globals()["SCALE"] = 100 + rank
    model = nn.Sequential(nn.Linear(2, 1), nn.Dropout())
    model[0].load_state_dict({"weight": torch.ones(1, 2), "bias": torch.ones(1)})
    model[1].train(rank == 0)  # the results differ
    try:
        report = cross_check(model, HELD[name][0](value, model), _Batch(torch.ones(50, 2)))
    except LayoutError as error:
        return set(re.findall(r"tensor in (run.*?): rank", str(error)))
    return {setting.partition(": ")[0] for setting in report.settings if setting.startswith("run")}


@once
def _found() -> dict[str, list[set[str]]]:
    return run_cases(_differing, 2, {name: (name,) for name in HELD})


@pytest.mark.parametrize("name", HELD)
def test_values_that_differ_between_ranks_are_named_by_their_place(name: str) -> None:
    assert _found()[name] == [HELD[name][1]] * 2


def _generator() -> Iterator[int]:
    yield 1


_TAKE = "take the item before, and pass it in the batch"
_DRAW = "draw from torch's default generator, which travels with the batch, or draw before and"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "held, step",
    [(_generator(), _TAKE), (iter([1]), _TAKE), (torch.utils.data.DataLoader([1]), _TAKE), (torch.Generator(), _DRAW)],
)
def test_iterators_and_generators_are_refused_with_what_to_do_instead(held: Any, step: str) -> None:
    with pytest.raises(TypeError, match=rf"run variable 'held' is a .*, whose state belongs to this rank only; {step}"):
        cross_check(nn.Linear(2, 1), _closure(held), torch.ones(1, 2))
