"""The values that a function holds besides its arguments."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp.debug._cross_check.run import held_values

MODEL = nn.Linear(2, 1)
WEIGHTS = torch.ones(3)
SCALE = 2.0


def _with_globals(model: Any, batch: Any) -> Any:
    return (model(batch) * WEIGHTS).sum() * SCALE


def _with_inner_globals(model: Any, batch: Any) -> Any:
    return sum(model(item).sum() * SCALE for item in batch)


def _with_attributes(model: Any, batch: Any) -> Any:
    return model(batch.WEIGHTS).sum()  # the name of an attribute is no global


class _Trainer:
    def __init__(self) -> None:
        self.model = MODEL
        self.scale = torch.ones(1)
        self.last_loss = torch.ones(1)  # of this rank alone
        self.shift = 0.0

    @property
    def shifted(self) -> float:
        return self.shift

    def run(self, model: Any, batch: Any) -> Any:
        return model(batch).sum() * self.scale

    def __call__(self, model: Any, batch: Any) -> Any:
        return self.run(model, batch) + self.shifted


def _closure(held: Any) -> Callable[..., Any]:
    def run(model: Any, batch: Any) -> Any:
        return model(batch).sum() * held

    return run


def _with_default(model: Any, batch: Any, scale: torch.Tensor = WEIGHTS, *, shift: int = 1) -> Any:
    return model(batch).sum() * scale + shift


class _Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)


TEACHER = _Teacher()


@pytest.mark.parametrize(
    "run, names",
    [
        (lambda model, batch: model(batch).sum(), set()),
        (_with_globals, {"run variable 'WEIGHTS'", "run variable 'SCALE'"}),
        (_with_inner_globals, {"run variable 'SCALE'"}),
        (_with_attributes, set()),
        (_closure(WEIGHTS), {"run variable 'held'"}),
        (_closure({"a": [WEIGHTS]}), {"run variable 'held'['a'][0]"}),
        (_closure(MODEL), set()),
        (_closure(MODEL.weight), set()),
        (_closure(TEACHER), {"run variable 'held'.net.weight"}),
        (functools.partial(_closure(1), WEIGHTS), {"run variable 'held'", "run argument 0"}),
        (_with_default, {"run default 0", "run default 'shift'"}),
        (_Trainer().run, {"run.__self__.scale"}),
        (_Trainer(), {"run.scale", "run.shift"}),
        (_closure(_closure(WEIGHTS)), {"run variable 'held' variable 'held'"}),
    ],
)
def test_tensors_and_numbers_are_found_by_place(run: Callable[..., Any], names: set[str]) -> None:
    assert set(held_values(run, MODEL)) == names


def _generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("held", [_generator(), iter([1]), torch.Generator(), enumerate([1])])
def test_iterators_and_generators_are_refused(held: Any) -> None:
    with pytest.raises(TypeError, match=r"run variable 'held' is a .*, whose state belongs to this rank only"):
        held_values(_closure(held), MODEL)


@pytest.mark.parametrize(
    "held, step",
    [
        (torch.Generator(), "draw from torch's default generator, which travels with the batch, or draw before and"),
        (iter([1]), "take the item before, and pass it in the batch"),
    ],
)
def test_the_advice_for_an_iterator_or_a_generator_can_be_followed(held: Any, step: str) -> None:
    with pytest.raises(TypeError) as caught:
        held_values(_closure(held), MODEL)

    assert step in str(caught.value)
