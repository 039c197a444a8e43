"""Changes of optimizer state outside of steps are found; changes by steps are ignored. One process."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from legacy_ddp._replicas.history import StateHistory
from tests.helpers.replica_observations import flip_lowest

Change = Callable[[torch.optim.Optimizer], object]


def _stepped(dtype: torch.dtype = torch.float32) -> tuple[torch.optim.Optimizer, StateHistory]:
    parameters = [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in ((2, 3), (600, 500), ())]
    optimizer, history = torch.optim.Adam(parameters, lr=0.5), StateHistory()
    _step(optimizer, history)
    history.end_call()
    return optimizer, history


def _step(optimizer: torch.optim.Optimizer, history: StateHistory) -> None:
    history.begin_step(optimizer)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    history.end_step(optimizer)


def _state(optimizer: torch.optim.Optimizer, index: int = 0) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = optimizer.state[optimizer.param_groups[0]["params"][index]]
    return state


def _load(optimizer: torch.optim.Optimizer) -> None:
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {key: dict(value) for key, value in saved["state"].items()}})


CHANGES: dict[str, Change] = {
    "lowest bit of a small tensor": lambda it: flip_lowest(_state(it)["exp_avg"], (1, 2)),
    "lowest bit of a large tensor": lambda it: flip_lowest(_state(it, 1)["exp_avg_sq"], (599, 499)),
    "lowest bit of a number": lambda it: flip_lowest(_state(it, 2)["exp_avg"], ()),
    "a count of steps": lambda it: _state(it)["step"].add_(1),
    "a sign": lambda it: _state(it)["exp_avg"].neg_(),
    "a tensor that is gone": lambda it: _state(it).pop("exp_avg"),
    "a tensor of zeros more": lambda it: _state(it).update(more=torch.zeros(2)),
    "everything cleared": lambda it: it.state.clear(),
}
NO_CHANGES: dict[str, Change] = {
    "nothing": id,
    "its own state loaded": _load,
    "a learning rate": lambda it: it.param_groups[0].update(lr=0.25),
    "an empty entry": lambda it: it.state[nn.Parameter(torch.ones(1))],
    "what has no bits of its own": lambda it: _state(it).update(note="text"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_found_now_and_by_the_next_step(name: str, dtype: torch.dtype) -> None:
    optimizer, history = _stepped(dtype)
    CHANGES[name](optimizer)

    assert history.snapshot() == (False, True)
    history.begin_step(optimizer)
    history.end_step(optimizer)
    assert history.snapshot() == (True, False)


@pytest.mark.parametrize("name", NO_CHANGES)
def test_what_changes_no_bit_of_the_state_is_no_change(name: str) -> None:
    optimizer, history = _stepped()
    NO_CHANGES[name](optimizer)

    assert history.snapshot() == (False, False)
    _step(optimizer, history)
    assert history.snapshot() == (False, False)


def test_a_change_at_every_step_is_a_habit() -> None:
    optimizer, history = _stepped()
    for _ in range(2):
        _state(optimizer)["exp_avg"].neg_()
        _step(optimizer, history)
        history.end_call()
    _state(optimizer)["exp_avg"].neg_()

    assert history.snapshot() == (False, False)


def test_state_that_is_mended_after_an_error_is_no_change() -> None:
    optimizer, history = _stepped()
    history.restart()
    _state(optimizer)["exp_avg"].neg_()
    _step(optimizer, history)

    assert history.snapshot() == (False, False)


def test_each_optimizer_is_followed_on_its_own() -> None:
    first, history = _stepped()
    second, _ = _stepped()
    _step(second, history)
    _step(first, history)
    assert history.snapshot() == (False, False)
    _state(second)["exp_avg"].neg_()

    assert history.snapshot() == (False, True)
