"""What counts as a backward pass: passes inside of a pass are no micro-batches, and a pass may end half-way."""

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from legacy_ddp import Checks, LegacyDistributedDataParallel, all_reduce_gradients
from tests.helpers import logged_warnings
from tests.helpers.cases import get_gradients
from tests.helpers.outcomes import same
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.small_models import KINDS, Said, error_of

# An exception in the middle of a backward pass


class _BrokenError(Exception):
    pass


class Loop:
    """Three layers, and a backward pass that an exception may end at the second."""

    def __init__(self, rank: int, kind: str) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.net = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 1))
        self.alone = copy.deepcopy(self.net)
        self.model = None if kind == "function" else LegacyDistributedDataParallel(self.net, **KINDS[kind])
        self.needs_size = kind == "reproducible"
        if self.model is None:
            self.call()  # the function knows its parameters from the first call on

    def batch(self, rank: int) -> torch.Tensor:
        return torch.tensor([[1.0, rank + 2.0]])

    def forward(self) -> torch.Tensor:
        return (self.model or self.net)(self.batch(self.rank)).square().sum()

    def backward(self) -> None:
        self.forward().backward()

    def break_off(self, *, loss: torch.Tensor | None = None) -> None:
        """A backward pass that an exception of a hook ends at the second layer, and that the script catches."""
        loss = self.forward() if loss is None else loss
        handle = self.net[1].weight.register_hook(_raise)
        with suppress(_BrokenError):
            loss.backward()
        handle.remove()

    def call(self, *, size: int = 1) -> None:
        arguments = {"sample_size": size} if self.needs_size or size != 1 else {}
        if self.model is None:
            all_reduce_gradients(self.net, **arguments)
        else:
            self.model.all_reduce(**arguments)

    def expected(self, ranks: range = range(2)) -> list[torch.Tensor]:
        """The mean over ``ranks``, in one process without the library."""
        self.alone.zero_grad()
        for rank in ranks:
            (self.alone(self.batch(rank)).square().sum() / len(ranks)).backward()
        return [parameter.grad for parameter in self.alone.parameters()]


def _raise(_: torch.Tensor) -> None:
    raise _BrokenError


def _half_then_whole(loop: Loop) -> None:
    loop.break_off()
    loop.backward()


def _whole_then_half(loop: Loop) -> None:
    loop.backward()
    loop.break_off()


def _half_of_a_second_pass_over_a_part(loop: Loop) -> None:
    loop.net.zero_grad()
    loop.backward()
    loop.net[2].weight.grad = None
    loop.break_off()
    loop.net[0].weight.grad = None


def _half_inside_another_pass(loop: Loop) -> None:
    """The exception comes from the pass of a re-entrant checkpoint."""
    hidden = loop.net[0](loop.batch(loop.rank))
    loss = checkpoint(loop.net[1:], hidden, use_reentrant=True).square().sum()
    loop.break_off(loss=loss)


def _half_in_a_block(loop: Loop) -> None:
    with nullcontext() if loop.model is None else loop.model.no_sync():
        loop.break_off()


def _half_in_a_block_then_whole(loop: Loop) -> None:
    _half_in_a_block(loop)
    loop.backward()


def _cleared_then_half(loop: Loop) -> None:
    loop.break_off()
    loop.net.zero_grad()
    loop.break_off()


FAULTS = {"half": Loop.break_off} | {
    act.__name__: act
    for act in (
        _half_then_whole,
        _whole_then_half,
        _half_of_a_second_pass_over_a_part,
        _half_inside_another_pass,
        _half_in_a_block,
        _half_in_a_block_then_whole,
        _cleared_then_half,
    )
}


def _tried_again(loop: Loop) -> None:
    loop.break_off()
    loop.net.zero_grad()
    loop.backward()


def _tried_again_in_place(loop: Loop) -> None:
    loop.break_off()
    loop.net.zero_grad(set_to_none=False)
    loop.backward()


def _tried_again_in_a_block(loop: Loop) -> None:
    if loop.model is None or loop.needs_size:  # there a block that failed is an error of its own
        _tried_again(loop)
        return
    with loop.model.no_sync():
        loop.break_off()
        loop.net.zero_grad()
        loop.backward()


def _broken_off_before_the_first_parameter(loop: Loop) -> None:
    loss = loop.forward()
    loss.register_hook(_raise)
    with suppress(_BrokenError):
        loss.backward()
    loop.backward()


def _failed_forward(loop: Loop) -> None:
    with suppress(RuntimeError):
        (loop.model or loop.net)(torch.ones(1, 5))
    loop.backward()


def _gradient_penalty(loop: Loop) -> None:
    """The gradient with respect to the input is linear in nothing that the mean needs: its weight is 0."""
    batch = loop.batch(loop.rank).requires_grad_()
    loss = (loop.model or loop.net)(batch).square().sum()
    (slope,) = torch.autograd.grad(loss, batch, create_graph=True)
    (loss + 0 * slope.square().sum()).backward()


def _other_model_broken_off(loop: Loop) -> None:
    other = nn.Linear(2, 1)
    handle = other.weight.register_hook(_raise)
    with suppress(_BrokenError):
        other(torch.ones(1, 2)).sum().backward()
    handle.remove()
    loop.backward()


def _in_a_thread(loop: Loop) -> None:
    thread = threading.Thread(target=loop.backward)
    thread.start()
    thread.join()


def _checkpointed(loop: Loop) -> None:
    hidden = loop.net[0](loop.batch(loop.rank))
    checkpoint(loop.net[1:], hidden, use_reentrant=True).square().sum().backward()


SILENT = {
    act.__name__: act
    for act in (
        _tried_again,
        _tried_again_in_place,
        _tried_again_in_a_block,
        _broken_off_before_the_first_parameter,
        _failed_forward,
        _gradient_penalty,
        _other_model_broken_off,
        _in_a_thread,
        _checkpointed,
    )
}


def _is_close(loop: Loop, expected: list[torch.Tensor]) -> bool:
    pairs = zip(get_gradients(loop.net), expected, strict=True)
    return all(grad is not None and torch.allclose(grad, one) for grad, one in pairs)


def _play(rank: int, kind: str, act: Callable[[Loop], None]) -> tuple[Said, bool, bool, bool]:
    """The error of the call if ``act`` runs on rank 1, whether it left every gradient, whether the means are those of
    one process, and whether a new step works."""
    loop = Loop(rank, kind)
    act(loop) if rank else loop.backward()
    before = get_gradients(loop.net)
    said = error_of(loop.call)
    is_untouched, is_right = same(before, get_gradients(loop.net)), _is_close(loop, loop.expected())
    loop.net.zero_grad()
    loop.backward()
    loop.call()
    return said, is_untouched, is_right, _is_close(loop, loop.expected())


def _left_out(rank: int, kind: str) -> bool:
    """Rank 1 clears its gradients and takes no part."""
    loop = Loop(rank, kind)
    if rank:
        loop.break_off()
        loop.net.zero_grad()
    else:
        loop.backward()
    loop.call(size=0 if rank else 2)
    return _is_close(loop, [grad / 2 for grad in loop.expected(range(1))])


def _both_ranks(rank: int, kind: str) -> Said:
    loop = Loop(rank, kind)
    loop.break_off()
    return error_of(loop.call)


def _tables(rank: int) -> dict[str, Any]:
    kinds = [*KINDS, "function"]
    found: dict[str, Any] = {
        "faults": {(kind, name): _play(rank, kind, act) for kind in kinds for name, act in FAULTS.items()},
        "silent": {(kind, name): _play(rank, kind, act) for kind in kinds for name, act in SILENT.items()},
        "left out": {kind: _left_out(rank, kind) for kind in kinds},
        "both": {kind: _both_ranks(rank, kind) for kind in kinds},
    }
    logged_warnings.take()  # of uneven work, and of several passes in one micro-batch
    return found


@pytest.mark.cpu("there an exception of a hook comes in a thread of torch; on the simulated device it ends the process")
@pytest.mark.usefixtures("transport")
def test_half_a_backward_is_not_averaged() -> None:
    for found in run_ranks(_tables, 2, timeout_seconds=120):
        for case, (said, is_untouched, _, is_mended) in found["faults"].items():
            assert said is not None, case
            assert said[0] == "PeerError", (case, said)
            text = " ".join(said[1].split())
            assert "rank 1: GradientError: an exception ended a backward() half-way since the last call" in text, case
            assert "rank 0: " not in text
            assert is_untouched, case
            assert is_mended, case
        for case, (said, _, is_right, is_mended) in found["silent"].items():
            assert (said, is_right, is_mended) == (None, True, True), case
        assert {kind for kind, is_right in found["left out"].items() if not is_right} == set()
        assert {None if said is None else said[0] for said in found["both"].values()} == {"GradientError"}


# Passes inside of a pass


class Nested(nn.Module):
    """A layer that is used ``times`` times, each time inside a checkpoint of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, times: int, *, reentrant: bool) -> torch.Tensor:
        for _ in range(times):
            x = torch.tanh(checkpoint(self.layer, x, use_reentrant=reentrant))
        return self.last(x)


@on_ranks(2, [([], [])] * 2)
def test_a_layer_used_several_times_under_a_reentrant_checkpoint_is_one_micro_batch(
    rank: int,
) -> tuple[list[str], list[str]]:
    """The cases with other counts, and what was told."""
    wrong = []
    for name, options in {
        "warn": {},
        "raise": {"checks": Checks(uneven="raise")},
        "reproducible": {"reproducible": True},
    }.items():
        for reentrant in (True, False):
            model = LegacyDistributedDataParallel(Nested(), **options)
            size = {"sample_size": 1} if name == "reproducible" else {}
            for micro_batches in (1, 2):
                model.zero_grad()
                for index in range(micro_batches):
                    x = torch.ones(1, 2).requires_grad_()
                    with model.no_sync() if index < micro_batches - 1 else nullcontext():
                        model(x, 3 if rank == 0 else 1, reentrant=reentrant).sum().backward()
                record = model.all_reduce(**size)
                if [row.micro_batches for row in record.rows] != [micro_batches] * 2:
                    wrong.append(f"{name}, {reentrant=}, {micro_batches=}")
    return wrong, logged_warnings.take()


def _second_tries(rank: int) -> dict[str, list[int]]:
    """The micro-batches of both ranks, after a pass of rank 1 was broken off, cleared and made again."""
    found = {}
    for set_to_none in (True, False):
        for times in (1, 2):
            model = LegacyDistributedDataParallel(Nested(), checks=Checks(uneven="raise"))
            x = torch.ones(1, 2).requires_grad_()
            if rank == 1:
                handle = model.module.layer.weight.register_hook(_raise)
                with suppress(_BrokenError):
                    model(x, times, reentrant=True).sum().backward()
                handle.remove()
                model.zero_grad(set_to_none=set_to_none)
            model(x, times, reentrant=True).sum().backward()
            found[f"{set_to_none=}, {times=}"] = [row.micro_batches for row in model.all_reduce().rows]
    return found | {"told": logged_warnings.take()}


@pytest.mark.cpu("there an exception of a hook comes in a thread of torch; on the simulated device it ends the process")
def test_a_second_try_after_a_broken_pass_is_one_micro_batch() -> None:
    for found in run_ranks(_second_tries, 2):
        assert found.pop("told") == []
        assert {case: counts for case, counts in found.items() if counts != [1, 1]} == {}
