"""Faults of communication hooks: the same error on all ranks, and unchanged gradients."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from legacy_ddp import CommHookError, LegacyDDPError, PeerError, PeerLostError
from tests.helpers import transports
from tests.helpers.cases import get_gradients, set_gradients, wrap_module
from tests.helpers.comm_hooks import at_once, mean
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import add_gradients, error_of, gradient_values, step, wrap


def _wrong_shape(bucket: Any) -> Any:
    return at_once(bucket.buffer()[:-1])


def _sparse_result(bucket: Any) -> Any:
    return at_once(bucket.buffer().to_sparse())


def _wrong_dtype(bucket: Any) -> Any:
    return at_once(bucket.buffer().double())


def _no_future(bucket: Any) -> Any:
    return bucket.buffer()


def _no_tensor(bucket: Any) -> Any:
    return at_once("done")


WRONG: dict[Callable[[Any], Any], str | None] = {
    _wrong_shape: "got float32 (1,) on {device}, expected float32 (2,) on {device}",
    _wrong_dtype: "got float64 (2,) on {device}, expected float32 (2,) on {device}",
    _sparse_result: "got torch.sparse_coo float32 (2,) on {device}, expected float32 (2,) on {device}",
    _no_future: None,  # a tensor at once is as good as a Future of it
    _no_tensor: "got str, expected a torch.futures.Future of a tensor",
}


@pytest.mark.unsimulated("it has no sparse tensors")
def test_a_result_of_no_use_is_the_same_error_on_all_ranks() -> None:
    # On rank 1 alone the others' collective would lack a partner, so both call none in the first round.
    seen = run_cases(_wrong_on_one, 2, {wrong.__name__: (wrong,) for wrong in WRONG})
    for wrong, words in WRONG.items():
        first, second = seen[wrong.__name__]
        text, ranks, after = first
        assert first == second
        assert after == [1.5]
        assert ranks == (() if words is None else (1,))
        assert text == "" if words is None else f"rank 1: {words.format(device=transports.device())}" in text
        assert words is None or "_wrong_on_one" in text, "the hook's name"


def _wrong_on_one(rank: int, wrong: Callable[[Any], Any]) -> Any:
    model, calls = wrap(), []

    def hook(state: Any, bucket: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            return mean(None, bucket)
        return wrong(bucket) if rank == 1 else at_once(bucket.buffer())

    model.register_comm_hook(None, hook)
    add_gradients(model, 1.0 + rank)
    text, ranks = "", ()
    try:
        model.all_reduce()
    except CommHookError as error:
        text, ranks = str(error), error.ranks
        assert list(gradient_values(model).values()) == [1.0 + rank]
    model.all_reduce()
    return text, ranks, list(gradient_values(model).values())


def _raising(rank: int, guilty: tuple[int, ...], error: Exception) -> Any:
    model = wrap(timeout_seconds=20.0)

    def hook(state: Any, bucket: Any) -> Any:
        if rank in guilty:
            raise error
        return mean(None, bucket)

    model.register_comm_hook(None, hook)
    add_gradients(model, 1.0)
    start = time.monotonic()
    try:
        model.all_reduce()
    except (RuntimeError, KeyError) as error:
        waited = time.monotonic() - start
        text = f"{error} {getattr(error, '__notes__', '')}"
        again = error_of(model.all_reduce)
        return type(error).__name__, text, waited < 20, gradient_values(model), again and again[0]
    return None


def test_a_hook_that_raises_on_all_ranks_is_its_own_error_there() -> None:
    for seen in run_ranks(partial(_raising, guilty=(0, 1), error=KeyError("the hook's own")), 2):
        assert seen[0] in {"KeyError", "PeerLostError"}
        assert "the hook's own" in seen[1]


@pytest.mark.cpu("a collective of a device goes on until its own timeout")
@pytest.mark.parametrize(
    "error, kind, words",
    [
        (KeyError("the hook's own"), "KeyError", "raised by the communication hook"),
        # Of a wrapper on another group, say: the ranks of this one have agreed on nothing.
        (PeerError("another call's"), "LegacyDDPError", "failed with PeerError: another call's"),
        (PeerLostError("another group's"), "LegacyDDPError", "failed with PeerLostError: another group's"),
        (RuntimeError("my hook wants the gloo group"), "RuntimeError", "my hook wants the gloo group"),
    ],
)
def test_a_hook_that_raises_on_one_rank_is_told_to_the_others_at_once(error: Any, kind: str, words: str) -> None:
    left, raised = run_ranks(partial(_raising, guilty=(1,), error=error), 2, survivors_exit=False)
    assert raised[0] == kind
    assert words in raised[1]
    assert left[0] == "PeerLostError"
    assert f"rank 1 left all_reduce() call 1 with {kind}" in " ".join(left[1].split())
    assert "fewer calls" not in left[1]
    for seen in (left, raised):
        assert seen[2:] == (True, {"weight": None}, "LostPeerError")


@on_ranks(2, [["CommHookError", [1.0] * 2, [1.0] * 3], ["CommHookError", [3.0] * 2, [3.0] * 3]])
def test_no_gradient_of_a_rank_that_skips_changes_when_a_hook_goes_wrong(rank: int) -> list[Any]:
    """Rank 1 takes no part, its gradients being what the last call left; rank 0's hook returns nonsense."""
    model, calls = wrap_module([torch.zeros(2), torch.zeros(3)]), []

    def hook(state: Any, bucket: Any) -> Any:
        calls.append(1)
        return at_once(None) if len(calls) == 2 and rank == 0 else at_once(bucket.buffer())

    model.register_comm_hook(None, hook)
    set_gradients(model, [torch.ones(2), torch.ones(3)])
    model.all_reduce()
    if rank == 1:
        for parameter in model.parameters():
            parameter.grad.fill_(3.0)
    said = error_of(model.all_reduce, skip=rank == 1)
    return [said and said[0], *(grad.tolist() for grad in get_gradients(model) if grad is not None)]


_SET_TO_NOTHING = ("TypeError", "set_buffer() got NoneType, expected a tensor in the buffer's place")


@pytest.mark.unsimulated("it has no memory that can be freed in place")
@on_ranks(1, [[1.0, 2.0, _SET_TO_NOTHING]])
def test_a_hook_may_free_its_buffer_and_may_not_set_it_to_nothing(rank: int) -> list[Any]:
    """Freed, and set to nothing."""
    model, calls = wrap(), []

    def hook(state: Any, bucket: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            bucket.set_buffer(None)
        mean = bucket.buffer().clone()
        bucket.buffer().untyped_storage().resize_(0)
        return at_once(mean)

    model.register_comm_hook(None, hook)
    found = [step(model, 1.0), step(model, 2.0)]
    return [*found, error_of(step, model, 3.0)]


def _together(rank: int) -> int:
    """The first bucket's mean is there when the second bucket's hook has begun."""
    model, first = wrap_module([torch.ones(2), torch.ones(3, dtype=torch.float64)], timeout_seconds=5.0), []

    def hook(state: Any, bucket: Any) -> Any:
        future: torch.futures.Future[Any] = torch.futures.Future()
        first.append((future, bucket))
        if bucket.is_last():
            for waiting, shown in first:
                waiting.set_result(shown.buffer())
        return future

    model.register_comm_hook(None, hook)
    set_gradients(model, [torch.ones(2), torch.ones(3, dtype=torch.float64)])
    return model.all_reduce().payload_bytes


def test_all_buckets_are_begun_before_the_first_is_awaited_and_their_bytes_are_counted() -> None:
    assert run_ranks(_together, 2) == [2 * 4 + 3 * 8] * 2


def _killed_in_the_hook(rank: int) -> Any:
    model = wrap(timeout_seconds=20.0)

    def hook(state: Any, bucket: Any) -> Any:
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return mean(None, bucket)

    model.register_comm_hook(None, hook)
    add_gradients(model, 1.0)
    try:
        model.all_reduce()
    except LegacyDDPError as error:
        return type(error).__name__, error.ranks, error.phase, gradient_values(model)
    return None


@pytest.mark.cpu("a collective of a device goes on until its own timeout")
def test_a_rank_that_dies_in_a_hooks_collective_is_named() -> None:
    seen = run_ranks(_killed_in_the_hook, 3, lost=(2,), survivors_exit=False)
    assert seen == [("PeerLostError", (2,), "hook", {"weight": None})] * 2 + [None]


def _silent_hook(rank: int, silent: set[int]) -> Any:
    model = wrap(timeout_seconds=3.0)

    def hook(state: Any, bucket: Any) -> Any:
        return torch.futures.Future() if rank in silent else at_once(bucket.buffer())

    model.register_comm_hook(None, hook)
    add_gradients(model, 1.0)
    try:
        model.all_reduce()
    except LegacyDDPError as error:
        return type(error).__name__, error.ranks, " ".join(str(error).split()), gradient_values(model)


def test_a_future_that_never_comes_ends_with_the_timeout_and_names_the_rank_whose_hook_it_is() -> None:
    # Rank 1 waits for its hook, the others for rank 1: whoever's patience ends first, all name it.
    seen = run_ranks(partial(_silent_hook, silent={1}), 3)
    for kind, ranks, text, values in seen:
        assert kind in ("SyncTimeoutError", "PeerLostError")
        assert ranks == (1,)
        assert "hook did not finish within 3 s" in text or "no answer within 3 s" in text
        assert "missing rank 1 (all_reduce() call 1: hook" in text
        assert values == {"weight": None}


def _nonsense_alone(rank: int) -> Any:
    model = wrap(timeout_seconds=2.0)
    model.register_comm_hook(None, lambda state, bucket: "done" if rank == 1 else mean(state, bucket))
    add_gradients(model, 1.0)
    return error_of(model.all_reduce)


@pytest.mark.cpu("a collective of a device goes on until its own timeout")
def test_a_rank_whose_hook_returns_nonsense_without_the_others_collective_is_named_with_the_result() -> None:
    for kind, text in run_ranks(_nonsense_alone, 3, lost=(0, 1, 2), survivors_exit=False):
        assert kind in ("SyncTimeoutError", "PeerLostError")
        assert (
            "missing rank 1 (all_reduce() call 1: its hook returned what cannot be a gradient: got str, expected a "
            "torch.futures.Future of a tensor"
        ) in " ".join(text.split())


def test_futures_that_never_come_on_any_rank_are_not_attributed_to_the_network() -> None:
    for _, ranks, text, _ in run_ranks(partial(_silent_hook, silent={0, 1}), 2):
        assert ranks == ()
        assert "hook did not finish within 3 s; no rank is missing, every rank is in its communication hook" in text


@on_ranks(2)
def _on_one_rank(rank: int) -> Any:
    model = wrap()
    if rank == 1:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    add_gradients(model, 1.0 + rank)
    said = error_of(model.all_reduce)
    return said, gradient_values(model)


def test_a_hook_on_one_rank_alone_is_a_layout_error_on_all() -> None:
    seen = _on_one_rank()
    for rank, ((kind, text), values) in enumerate(seen):
        assert kind == "LayoutError"
        assert "comm_hook" in text
        assert "fp16_compress_hook" in text
        assert values == {"weight": 1.0 + rank}


@on_ranks(1)
def _refused(rank: int) -> list[Any]:
    model = wrap()
    said = [error_of(model.register_comm_hook, None, "allreduce")]
    model.register_comm_hook(None, mean)
    said.append(error_of(model.register_comm_hook, None, mean))
    for argument in ({"reduce_dtype": torch.bfloat16}, {"reproducible": True}):
        other = wrap(**argument)
        said.append(error_of(other.register_comm_hook, None, mean))
        other.zero_grad()
        add_gradients(other, 1.0)
        other.all_reduce(sample_size=1)  # what was refused left no trace
    return said


def test_what_cannot_be_a_hook_is_refused_with_the_reason() -> None:
    (said,) = _refused()
    assert [kind for kind, _ in said] == ["TypeError", "ValueError", "ValueError", "ValueError"]
    for (_, text), words in zip(
        said,
        ["got 'allreduce', expected hook(state, bucket)", "registered already", "reduce_dtype", "reproducible"],
        strict=True,
    ):
        assert words in text
