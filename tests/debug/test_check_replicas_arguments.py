"""Wrong arguments of check_replicas() are reported, on one rank and on all, and the group stays usable."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp.debug import check_replicas, cross_check
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import Said, error_of, wrap


def _call_with(rank: int, arguments: Any, wrong: tuple[int, ...]) -> tuple[Said, bool]:
    """The error of a call with ``arguments`` on the ranks in ``wrong``, and whether the next call works."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    said = error_of(check_replicas, **({"model": model} | (arguments if rank in wrong else {})))
    return said, check_replicas(model).identical


_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "what in one string": ({"what": "parameters"}, "TypeError"),
    "what unknown": ({"what": ["weights"]}, "ValueError"),
    "what of numbers": ({"what": [1]}, "TypeError"),
    "what no iterable": ({"what": 1}, "TypeError"),
    "details negative": ({"details": -1}, "ValueError"),
    "details a bool": ({"details": True}, "ValueError"),
    "details a float": ({"details": 1.5}, "ValueError"),
    "raises a number": ({"raises": 1}, "TypeError"),
    "local buffers in one string": ({"local_buffers": "1.running_mean"}, "TypeError"),
    "local buffers unknown": ({"local_buffers": ["1.nothing"]}, "ValueError"),
    "local buffers a number": ({"local_buffers": 3}, "TypeError"),
    "what a number": ({"what": 3}, "TypeError"),
    "what empty": ({"what": ()}, "ValueError"),
    "optimizers without any": ({"what": ["optimizer"]}, "ValueError"),
    "optimizer a string": ({"optimizer": "SGD"}, "TypeError"),
    "optimizer a class": ({"optimizer": [torch.optim.SGD]}, "TypeError"),
    "optimizer a number": ({"optimizer": 1}, "TypeError"),
    "model a number": ({"model": 1}, "TypeError"),
    "model several tensors": ({"model": [torch.ones(2)]}, "TypeError"),
}

# Right by themselves, and not those of the other rank.
_OTHER = {"other what": {"what": ["buffers"]}, "other details": {"details": 7}, "other raises": {"raises": True}}


def _call_with_each(rank: int, wrong: tuple[int, ...]) -> dict[str, tuple[Said, bool]]:
    cases = {**{name: arguments for name, (arguments, _) in _WRONG.items()}, **_OTHER}
    return {name: _call_with(rank, arguments, wrong) for name, arguments in cases.items()}


@cache
def _found(wrong: tuple[int, ...]) -> list[dict[str, tuple[Said, bool]]]:
    return run_ranks(_call_with_each, 2, wrong)


@pytest.mark.parametrize("name", _WRONG)
def test_an_argument_wrong_on_every_rank_is_the_rank_s_own_error(name: str) -> None:
    _, kind = _WRONG[name]

    for found in _found((0, 1)):
        said, usable = found[name]
        assert said is not None
        assert (said[0], usable) == (kind, True), said


@pytest.mark.parametrize("name", _WRONG)
def test_an_argument_wrong_on_one_rank_is_an_error_on_all(name: str) -> None:
    _, kind = _WRONG[name]
    first, second = (found[name] for found in _found((1,)))

    assert first == second
    assert first[0] is not None
    assert (first[0][0], first[1]) == ("PeerError", True)
    assert f"rank 1: {kind}: " in first[0][1]


@pytest.mark.parametrize(
    "name, word", [("other what", "what"), ("other details", "details"), ("other raises", "raises")]
)
def test_ranks_that_ask_for_other_things_are_reported(name: str, word: str) -> None:
    first, second = (found[name] for found in _found((1,)))

    assert first == second
    assert first[0] is not None
    assert (first[0][0], first[1]) == ("LayoutError", True)
    assert word in first[0][1]


@pytest.mark.usefixtures("alone")
def test_a_compiled_wrapper_is_the_wrapper_to_the_tools() -> None:
    model = wrap()
    compiled = torch.compile(model, backend="eager")

    assert check_replicas(compiled).identical
    assert cross_check(compiled, lambda model, batch: model(batch).sum(), torch.ones(3, 2)).agrees
