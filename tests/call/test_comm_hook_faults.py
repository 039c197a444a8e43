"""Faults of communication hooks: the same error on all ranks, and unchanged gradients."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from legacy_ddp import CommHookError, LayoutError, LostPeerError, PeerError, PeerLostError
from tests.helpers import transports
from tests.helpers.cases import get_gradients, set_gradients, wrap_module
from tests.helpers.comm_hooks import at_once, mean
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import fork_ranks, fork_scripts
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import add_gradients, error_of, gradient_values, step, wrap
from tests.helpers.torch_versions import without_gloo_lines

# The result for a buffer, and what is told of it.
WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], str | None]] = {
    "shape": (lambda buffer: at_once(buffer[:-1]), "got float32 (1,) on {device}, expected float32 (2,) on {device}"),
    "dtype": (lambda buffer: at_once(buffer.double()), "got float64 (2,) on {device}, expected float32 (2,) on"),
    "sparse": (lambda buffer: at_once(buffer.to_sparse()), "got torch.sparse_coo float32 (2,) on {device}, expected"),
    "no future": (lambda buffer: buffer, None),  # a tensor at once is as good as a Future of it
    "no tensor": (lambda _: at_once("done"), "got str, expected a torch.futures.Future of a tensor"),
}


@pytest.mark.unsimulated("it has no sparse tensors")
def test_a_result_of_no_use_is_the_same_error_on_all_ranks() -> None:
    # On rank 1 alone the others' collective would lack a partner, so both call none in the first round.
    seen = run_cases(_wrong_on_one, 2, {name: (name,) for name in WRONG})
    for name, (_, words) in WRONG.items():
        first, second = seen[name]
        text, ranks, after = first
        assert first == second
        assert after == [1.5]
        assert ranks == (() if words is None else (1,))
        assert text == "" if words is None else f"rank 1: {words.format(device=transports.device())}" in text
        assert words is None or "_wrong_on_one" in text, "the hook's name"


def _wrong_on_one(rank: int, name: str) -> Any:
    model, calls = wrap(), []

    def hook(state: Any, bucket: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            return mean(None, bucket)
        return WRONG[name][0](bucket.buffer()) if rank == 1 else at_once(bucket.buffer())

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


class Seen(NamedTuple):
    """The error of a call, with its notes, on one rank; the gradients after the call, and the error of the next one."""

    kind: str
    text: str
    ranks: tuple[int, ...]
    phase: str | None
    waited_seconds: float
    values: dict[str, float | None]
    later: str


def _fail(rank: int, hooks: dict[int, Callable[[Any, Any], Any]], timeout_seconds: float = 20.0) -> Seen:
    """A call with the ``hooks`` of some ranks; the other ranks have the hook ``mean``."""
    model = wrap(timeout_seconds=timeout_seconds)

    def hook(state: Any, bucket: Any) -> Any:  # one name on all ranks
        return hooks.get(rank, mean)(state, bucket)

    model.register_comm_hook(None, hook)
    add_gradients(model, 1.0)
    start = time.monotonic()
    with pytest.raises((RuntimeError, KeyError)) as caught:
        model.all_reduce()
    error, seconds = caught.value, time.monotonic() - start
    facts = getattr(error, "ranks", ()), getattr(error, "phase", None)
    text = " ".join(f"{error} {getattr(error, '__notes__', '')}".split())
    with pytest.raises(LostPeerError) as later:
        model.all_reduce()
    return Seen(type(error).__name__, text, *facts, seconds, gradient_values(model), type(later.value).__name__)


def _raise(state: Any, bucket: Any, *, error: Exception) -> Any:
    raise error


def _kill(state: Any, bucket: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def _never(state: Any, bucket: Any) -> Any:
    return torch.futures.Future()


def _at_once(state: Any, bucket: Any) -> Any:
    return at_once(bucket.buffer())


def _nonsense(state: Any, bucket: Any) -> Any:
    return "done"


def test_a_hook_that_raises_on_all_ranks_is_its_own_error_there() -> None:
    for seen in run_ranks(_fail, 2, dict.fromkeys((0, 1), partial(_raise, error=KeyError("the hook's own")))):
        assert seen.kind in {"KeyError", "PeerLostError"}
        assert "the hook's own" in seen.text


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
    left, raised = run_ranks(_fail, 2, {1: partial(_raise, error=error)}, survivors_exit=False)
    assert raised.kind == kind
    assert words in raised.text
    assert left.kind == "PeerLostError"
    assert f"rank 1 left all_reduce() call 1 with {kind}" in left.text
    assert "fewer calls" not in left.text
    for seen in (left, raised):
        assert seen.waited_seconds < 20
        assert (seen.values, seen.later) == ({"weight": None}, "LostPeerError")


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


@on_ranks(2, [2 * 4 + 3 * 8] * 2)
def test_all_buckets_are_begun_before_the_first_is_awaited_and_their_bytes_are_counted(rank: int) -> int:
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


@pytest.mark.cpu("a collective of a device goes on until its own timeout")
def test_a_rank_that_dies_in_a_hooks_collective_is_named() -> None:
    for seen in run_ranks(_fail, 3, {2: _kill}, lost=(2,), survivors_exit=False)[:2]:
        assert (seen.kind, seen.ranks, seen.phase, seen.values) == ("PeerLostError", (2,), "hook", {"weight": None})


def test_a_future_that_never_comes_ends_with_the_timeout_and_names_the_rank_whose_hook_it_is() -> None:
    # Rank 1 waits for its hook, the others for rank 1: whoever's patience ends first, all name it.
    for seen in run_ranks(_fail, 3, {0: _at_once, 1: _never, 2: _at_once}, 3.0):
        assert seen.kind in ("SyncTimeoutError", "PeerLostError")
        assert seen.ranks == (1,)
        assert "hook did not finish within 3 s" in seen.text or "no answer within 3 s" in seen.text
        assert "missing rank 1 (all_reduce() call 1: hook" in seen.text
        assert seen.values == {"weight": None}


@pytest.mark.cpu("a collective of a device goes on until its own timeout")
def test_a_rank_whose_hook_returns_nonsense_without_the_others_collective_is_named_with_the_result() -> None:
    for seen in run_ranks(_fail, 3, {1: _nonsense}, 2.0, lost=(0, 1, 2), survivors_exit=False):
        assert seen.kind in ("SyncTimeoutError", "PeerLostError")
        assert (
            "missing rank 1 (all_reduce() call 1: its hook returned what cannot be a gradient: got str, expected a "
            "torch.futures.Future of a tensor"
        ) in seen.text


def test_futures_that_never_come_on_any_rank_are_not_attributed_to_the_network() -> None:
    for seen in run_ranks(_fail, 2, {0: _never, 1: _never}, 2.0):
        assert seen.ranks == ()
        assert (
            "hook did not finish within 2 s; no rank is missing, every rank is in its communication hook" in seen.text
        )


@on_ranks(2, [{"weight": 1.0}, {"weight": 2.0}])
def test_a_hook_on_one_rank_alone_is_a_layout_error_on_all(rank: int) -> Any:
    model = wrap()
    if rank == 1:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    add_gradients(model, 1.0 + rank)
    with pytest.raises(LayoutError, match=r"comm_hook(.|\n)*fp16_compress_hook"):
        model.all_reduce()
    return gradient_values(model)


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_a_hook_is_refused_with_the_reason() -> None:
    model = wrap()
    with pytest.raises(TypeError, match=r"got 'allreduce', expected hook\(state, bucket\)"):
        model.register_comm_hook(None, "allreduce")
    model.register_comm_hook(None, mean)
    with pytest.raises(ValueError, match="registered already"):
        model.register_comm_hook(None, mean)
    for argument in ({"reduce_dtype": torch.bfloat16}, {"reproducible": True}):
        other = wrap(**argument)
        with pytest.raises(ValueError, match=next(iter(argument))):
            other.register_comm_hook(None, mean)
        add_gradients(other, 1.0)
        other.all_reduce(sample_size=1)  # what was refused left no trace


# Exit of a process with a pending collective of a hook

_LEFT_BEHIND = """
import atexit, threading, time
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from legacy_ddp import LegacyDistributedDataParallel

dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
module = nn.ParameterList([torch.ones(2), torch.ones(2, dtype=torch.float64)])
model = LegacyDistributedDataParallel(module, timeout_seconds=60.0)
first, exiting = torch.futures.Future(), threading.Event()

def hook(state, bucket):
    if bucket.index() == 1:
        raise KeyError("the second bucket's")
    return first

def end():
    exiting.wait()
    time.sleep(1.0)  # being late is the fault
    print("the first bucket's collective has ended", flush=True)
    first.set_result(torch.ones(2))

model.register_comm_hook(None, hook)
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
try:
    model.all_reduce()
except KeyError as error:
    print(error, flush=True)
threading.Thread(target=end, daemon=True).start()
atexit.register(exiting.set)
dist.destroy_process_group()
"""
_NEVER_ENDS = _LEFT_BEHIND.replace("timeout_seconds=60.0", "timeout_seconds=0.5").replace(
    "threading.Thread(target=end, daemon=True).start()\n", ""
)


def test_a_process_ends_after_the_collectives_that_its_hook_began_and_waits_no_longer_than_the_timeout() -> None:
    runs = fork_scripts([("-c", _LEFT_BEHIND), ("-c", _NEVER_ENDS)], [{}, {}], limit_seconds=60.0)

    raised, ended = '"the second bucket\'s"', "the first bucket's collective has ended"
    for run, said in zip(runs, ([raised, ended], [raised]), strict=True):
        assert (run.returncode, without_gloo_lines(run.stdout).splitlines()) == (0, said), run.stderr


_SURVIVES = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from legacy_ddp import LegacyDistributedDataParallel, PeerLostError

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], size), rank=rank, world_size=size)
model = LegacyDistributedDataParallel(torch.nn.Linear(3, 1), timeout_seconds=60.0)

def hook(group, bucket):
    if rank == 1:
        raise KeyError("the hook's own")
    return default_hooks.allreduce_hook(group, bucket)

model.register_comm_hook(dist.group.WORLD, hook)  # so that the group, and its threads, live until the process ends
try:
    model(torch.ones(2, 3)).sum().backward()
    model.all_reduce()
except (KeyError, PeerLostError) as error:
    print(f"rank {rank}: {type(error).__name__}")
finally:
    dist.destroy_process_group()
"""


@pytest.mark.thorough
def test_the_survivors_of_a_hook_that_raised_end_with_code_0(tmp_path: Path) -> None:
    """Among more than three ranks, some are not connected with the rank that ends first."""
    run = fork_ranks(4, "-c", _SURVIVES, str(tmp_path / "store"), environment={"GLOO_SOCKET_IFNAME": "lo"})

    said = [f"rank {rank}: {'KeyError' if rank == 1 else 'PeerLostError'}" for rank in range(4)]
    assert (run.returncode, sorted(without_gloo_lines(run.stdout).splitlines())) == (0, said), run.stderr
