"""Wrong arguments of check_replicas() are reported, on one rank and on all, and the group stays usable."""

from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp.debug import check_replicas, cross_check
from tests.helpers.shared_jobs import once, run_cases
from tests.helpers.small_models import Said, error_of, wrap

# Name: an argument, and the error of a rank that gives it; "" if it is wrong only beside the other rank's.
ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "what in one string": ({"what": "parameters"}, "TypeError"),
    "what unknown": ({"what": ["weights"]}, "ValueError"),
    "what of numbers": ({"what": [1]}, "TypeError"),
    "what no iterable": ({"what": 1}, "TypeError"),
    "what empty": ({"what": ()}, "ValueError"),
    "details negative": ({"details": -1}, "ValueError"),
    "details a bool": ({"details": True}, "ValueError"),
    "details a float": ({"details": 1.5}, "ValueError"),
    "raises a number": ({"raises": 1}, "TypeError"),
    "local buffers in one string": ({"local_buffers": "1.running_mean"}, "TypeError"),
    "local buffers unknown": ({"local_buffers": ["1.nothing"]}, "ValueError"),
    "local buffers a number": ({"local_buffers": 3}, "TypeError"),
    "optimizers without any": ({"what": ["optimizer"]}, "ValueError"),
    "optimizer a string": ({"optimizer": "SGD"}, "TypeError"),
    "optimizer a class": ({"optimizer": [torch.optim.SGD]}, "TypeError"),
    "model a number": ({"model": 1}, "TypeError"),
    "model several tensors": ({"model": [torch.ones(2)]}, "TypeError"),
    "other what": ({"what": ["buffers"]}, ""),
    "other details": ({"details": 7}, ""),
    "other raises": ({"raises": True}, ""),
}


def _call_with(rank: int, arguments: Any, wrong: tuple[int, ...]) -> tuple[Said, bool]:
    """The error of a call with ``arguments`` on the ranks in ``wrong``, and whether the next call works."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    said = error_of(check_replicas, **({"model": model} | (arguments if rank in wrong else {})))
    return said, check_replicas(model).identical


@once
def _found() -> dict[Any, list[tuple[Said, bool]]]:
    wrong_on = ((1,), (0, 1))
    return run_cases(_call_with, 2, {(name, on): (ARGUMENTS[name][0], on) for name in ARGUMENTS for on in wrong_on})


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_wrong_argument_is_the_rank_s_own_error_or_one_of_all_and_the_next_call_works(name: str) -> None:
    kind = ARGUMENTS[name][1]
    first, second = _found()[name, (1,)]

    assert first == second
    assert first[0] is not None
    assert (first[0][0], first[1]) == ("PeerError" if kind else "LayoutError", True)
    assert (f"rank 1: {kind}: " if kind else name.removeprefix("other ")) in first[0][1]
    for said, is_usable in _found()[name, (0, 1)]:
        assert (said and said[0], is_usable) == (kind or None, True), said


@pytest.mark.usefixtures("alone")
def test_a_compiled_wrapper_is_the_wrapper_to_the_tools() -> None:
    model = wrap()
    compiled = torch.compile(model, backend="eager")

    assert check_replicas(compiled).identical
    assert cross_check(compiled, lambda model, batch: model(batch).sum(), torch.ones(3, 2)).agrees
