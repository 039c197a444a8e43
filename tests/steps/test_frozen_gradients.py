"""Gradients that backward has made in layers that are frozen in the call: the optimizer must not step them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import KINDS, Said, error_of


class Loop:
    """Two layers of one wrapper, both in the optimizer; the first was frozen at construction."""

    def __init__(self, rank: int, kind: str) -> None:
        self.batch = torch.full((1, 2), rank + 1.0)
        self.size = {"sample_size": 1} if kind == "reproducible" else {}
        self.layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
        for parameter in self.layers.parameters():
            nn.init.ones_(parameter)
        self.freeze()
        self.model = LegacyDistributedDataParallel(self.layers, **KINDS[kind])
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)

    def freeze(self) -> None:
        self.layers[0].weight.requires_grad_(False)

    def thaw(self) -> None:
        self.layers[0].weight.requires_grad_(True)

    def backward(self) -> None:
        self.model(self.batch).sum().backward()

    def call(self) -> None:
        self.model.all_reduce(**self.size)


def _frozen_again(loop: Loop) -> None:
    loop.thaw()
    loop.backward()
    loop.freeze()
    loop.call()


def _frozen_for_the_first_time(loop: Loop) -> None:
    """The layer was part of an earlier call."""
    loop.thaw()
    loop.backward()
    loop.call()
    loop.optimizer.zero_grad()
    _frozen_again(loop)


def _two_backward_passes(loop: Loop) -> None:
    loop.thaw()
    loop.backward()
    loop.freeze()
    loop.backward()
    loop.call()


def _two_calls(loop: Loop) -> None:
    _frozen_again(loop)
    loop.layers[1].weight.grad = None
    loop.backward()
    loop.call()


FAULTS = {act.__name__: act for act in (_frozen_again, _frozen_for_the_first_time, _two_backward_passes, _two_calls)}


def _cleared_when_frozen(loop: Loop) -> None:
    _frozen_again(loop)
    loop.layers[0].weight.grad = None


def _cleared_in_place(loop: Loop) -> None:
    _frozen_again(loop)
    loop.layers[0].weight.grad.zero_()  # type: ignore[union-attr]


def _frozen_after_the_call(loop: Loop) -> None:
    loop.thaw()
    loop.backward()
    loop.call()
    loop.freeze()


def _thawed_again_before_the_call(loop: Loop) -> None:
    loop.thaw()
    loop.backward()
    loop.freeze()
    loop.thaw()
    loop.call()


def _given_by_hand(loop: Loop) -> None:
    """The script reduces this layer in its own way: the tensor is the script's own."""
    _frozen_again(loop)
    loop.layers[0].weight.grad = torch.ones(2, 2)


def _local_step(loop: Loop) -> None:
    _frozen_again(loop)
    with loop.model.no_sync():
        loop.optimizer.step()


def _not_in_the_optimizer(loop: Loop) -> None:
    _frozen_again(loop)
    loop.optimizer = torch.optim.SGD(loop.layers[1].parameters(), lr=0.125)


SILENT = {
    act.__name__: act
    for act in (
        _cleared_when_frozen,
        _cleared_in_place,
        _frozen_after_the_call,
        _thawed_again_before_the_call,
        _given_by_hand,
        _local_step,
        _not_in_the_optimizer,
    )
}


def _run(rank: int, kind: str, act: Callable[[Loop], None]) -> tuple[Said, list[float], Said]:
    """The error of the step, the weights of the first layer before it, and the error after the gradient is cleared."""
    loop = Loop(rank, kind)
    act(loop)
    said = error_of(loop.optimizer.step)
    weights = loop.layers[0].weight.detach().flatten().tolist()
    loop.optimizer.zero_grad()
    return said, weights, error_of(loop.optimizer.step)


def _table(rank: int) -> dict[tuple[str, str], Any]:
    return {
        (kind, name): _run(rank, kind, act)
        for kind in KINDS
        for name, act in (FAULTS | SILENT).items()
        if not (kind == "reproducible" and act is _two_backward_passes)  # two micro-batches in one
    }


@pytest.mark.usefixtures("transport")
def test_a_layer_frozen_between_backward_and_call_is_not_stepped_with_local_gradients() -> None:
    of_ranks = run_ranks(_table, 2)
    for found in of_ranks:
        for (kind, name), (said, weights, after) in found.items():
            assert after is None, (kind, name)
            is_guarded = kind != "off" and name in FAULTS
            assert (said is not None) == is_guarded, (kind, name, said)
            if said is not None:
                assert weights == [1.0] * 4 or name == "_frozen_for_the_first_time", (kind, name)
                assert said == ("UnsynchronizedStepError", said[1])
                assert "parameter '0.weight' of the wrapped Sequential" in said[1]
                assert "frozen (requires_grad=False) before the call" in said[1]
    for case, (_, weights, _) in of_ranks[0].items():
        if case[0] != "off" and case[1] != "_local_step":  # where ranks part on purpose
            assert of_ranks[1][case][1] == weights, case
