"""How does a test run a function on several real ranks, and learn which rank was to blame?

One process per rank, forked from a server that has torch loaded, gloo over a file store. A process
tells its parent "ready", "returned" or "raised"; a hung one writes its stack when signalled.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers import logged_warnings

# What most ranks load anyway (any optimizer step imports torch._dynamo), or some for a second (what compiles imports
# inductor): once in the server instead of once per rank and test.
_PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "hypothesis",
    "pytest",
    "legacy_ddp",
]
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
# faulthandler.dump_traceback_later is one timer per process and the code under test may own it.
_STACK_SIGNAL = signal.SIGUSR2
# How long the others have to fail as well after a first failure, and lost ranks to end after all others did.
_SETTLE_SECONDS = 1.0
# How long the survivors of a lost rank have to exit by themselves.
_EXIT_SECONDS = 8.0
# Faults are listed in this order: what a rank did, what gloo blames on a peer, who merely waits.
_CAUSE, _PEER_ERROR, _HUNG = range(3)
_PEER_ERRORS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


class RankFailure(AssertionError):  # noqa: N818 - pytest shows the name: what failed is the rank, not the helper
    """Says which ranks failed and how, the likely cause first; ``ranks`` holds them in that order."""

    def __init__(self, message: str, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


@dataclass
class _Rank:
    """What the parent knows about one process."""

    rank: int
    process: ForkServerProcess
    pipe: Connection
    stack_path: Path
    ready: bool = False
    ended: bool = False
    returned: bytes | None = None
    fault: str = ""
    fault_order: tuple[int, float] = (_CAUSE, 0.0)  # then by time

    def blame(self, fault: str, order: int, at: float) -> None:
        """Record the first fault only: what follows it is noise."""
        if not self.fault:
            self.fault, self.fault_order = f"rank {self.rank} {fault}", (order, at)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout_seconds: float = 60.0,
    start_seconds: float = 180.0,
    lost: Collection[int] = (),
    survivors_exit: bool = True,
    store: str = "file",
) -> list[Any]:
    """Return ``[fn(0, *args), fn(1, *args), ...]``, each call made on its own rank of a gloo group.

    ``fn`` is a module-level function or a :func:`functools.partial` of one. Arguments and results
    travel by value. Warnings on a rank are errors, also those that the library logs instead. Changes
    a test makes to ``os.environ`` do not reach the ranks. The clock of ``timeout_seconds`` starts when
    the group is up on every rank, and again for the processes to exit once every result is there.

    Ranks in ``lost`` may die, hang or be killed: their result is then ``None``. They are not waited
    for once the others are done; an exception on them still fails. The others must exit by themselves,
    with code 0 and soon; ``survivors_exit=False`` forgives those that returned but cannot exit.

    ``store``: ``"file"``, or ``"rank0"`` for a TCP store that lives in rank 0 and is lost with it, as
    under a launcher without a store of its own.

    Raises:
        RankFailure: a rank raised, died, hung, or returned but did not exit.
    """
    __tracebackhide__ = True
    job = pickle.dumps((fn, args))
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        ranks: list[_Rank] = []
        try:
            for rank in range(world_size):
                ranks.append(_start(rank, world_size, job, Path(directory), store))
            _watch(ranks, timeout_seconds, start_seconds, lost, survivors_exit)
            _blame_hung(ranks, lost, survivors_exit)
        finally:
            _reap(ranks)
    _raise_faults(ranks)
    return [None if r.returned is None else pickle.loads(r.returned) for r in ranks]


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def _start(rank: int, world_size: int, job: bytes, directory: Path, store: str) -> _Rank:
    ours, theirs = _context().Pipe()
    stack_path = directory / f"stack-{rank}"
    arguments = (rank, world_size, job, store, stack_path, theirs)
    process = _context().Process(target=_run_rank, args=arguments)
    process.start()
    theirs.close()
    return _Rank(rank, process, ours, stack_path)


def _run_rank(rank: int, world_size: int, job: bytes, store: str, stack_path: Path, pipe: Connection) -> None:
    """Child: run the job and report. A result is sent before the group is destroyed, which may block."""
    faulthandler.register(_STACK_SIGNAL, file=os.open(stack_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    warnings.simplefilter("error")
    logged_warnings.listen()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = _LOOPBACK
    tempfile.tempdir = str(stack_path.parent)  # what a rank leaves behind when it is killed goes with the test
    try:
        fn, args = pickle.loads(job)
        rendezvous = _meet(store, rank, world_size, stack_path.parent)
        dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=world_size)
        _tell(pipe, "ready", None)
        pipe.recv_bytes()  # all are ready: a rank that dies at once cannot disturb another's start
        result = fn(rank, *args)
        logged_warnings.assert_nothing_left()
        _tell(pipe, "returned", pickle.dumps(result))
    except SystemExit:
        raise  # an exit code is a way to die, not an exception
    except BaseException:  # noqa: BLE001 - all of it is reported, and pytest.fail() is no Exception
        _tell(pipe, "raised", traceback.format_exc())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _meet(store: str, rank: int, world_size: int, directory: Path) -> dist.Store:
    shared = dist.FileStore(str(directory / "store"), world_size)
    if store == "file":
        return shared
    if rank > 0:
        return dist.TCPStore("127.0.0.1", int(shared.get("port")), world_size, wait_for_workers=False)
    server = dist.TCPStore("127.0.0.1", 0, world_size, is_master=True, wait_for_workers=False)
    shared.set("port", str(server.port))
    return server


def _tell(pipe: Connection, kind: str, payload: bytes | str | None) -> None:
    # Not pipe.send(): torch teaches its pickler to share tensors through file descriptors that die with the rank.
    pipe.send_bytes(pickle.dumps((kind, payload, time.monotonic())))


def _watch(
    ranks: list[_Rank], timeout_seconds: float, start_seconds: float, lost: Collection[int], survivors_exit: bool
) -> None:
    """Follow the ranks until all have ended or time is up: to start, to run, to exit, then for the lost ones."""
    awaited = [r for r in ranks if r.rank not in lost] or ranks
    stage, deadline = "start", time.monotonic() + start_seconds
    while running := [r for r in ranks if not r.ended]:
        now = time.monotonic()
        if stage == "start" and all(r.ready for r in ranks):
            stage, deadline = "run", now + timeout_seconds
            _release(running)
        failed = any(r.fault for r in ranks)
        if stage != "settle" and (failed or (lost and all(r.ended for r in awaited))):
            stage, deadline = "settle", now + _SETTLE_SECONDS
        elif stage == "run" and all(r.ended or r.returned is not None for r in awaited):
            patience = _EXIT_SECONDS if survivors_exit else _SETTLE_SECONDS
            stage, deadline = "exit", now + (patience if lost else timeout_seconds)
        if now >= deadline:
            return
        wait([*(r.process.sentinel for r in running), *(r.pipe for r in running if not r.pipe.closed)], deadline - now)
        for r in running:
            _listen(r, lost)


def _release(ranks: Iterable[_Rank]) -> None:
    for r in ranks:
        with suppress(OSError):  # it died meanwhile, which its sentinel reports
            r.pipe.send_bytes(b"go")


def _listen(r: _Rank, lost: Collection[int]) -> None:
    """Read what the rank said and whether its process ended."""
    r.ended = not r.process.is_alive()  # asked first: all a dead rank said is in the pipe by now
    try:
        while not r.pipe.closed and r.pipe.poll():
            _note(r, *pickle.loads(r.pipe.recv_bytes()))
    except (EOFError, OSError):
        r.pipe.close()
    code = r.process.exitcode
    if r.ended and r.rank not in lost and (code != 0 or r.returned is None):
        when = "after returning" if r.returned is not None else "before returning"
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        r.blame(f"died {when}: {how}", _CAUSE, time.monotonic())


def _note(r: _Rank, kind: str, payload: Any, at: float) -> None:
    if kind == "ready":
        r.ready = True
    elif kind == "returned":
        r.returned = payload
    else:
        r.blame(f"raised\n{payload}", _PEER_ERROR if any(text in payload for text in _PEER_ERRORS) else _CAUSE, at)


def _blame_hung(ranks: list[_Rank], lost: Collection[int], survivors_exit: bool) -> None:
    """Blame the ranks that are still running, with their stacks; behind any rank that failed by itself."""
    forgiven = {r.rank for r in ranks if r.returned and not survivors_exit} | {*lost}
    hung = [r for r in ranks if not r.ended and not r.fault and r.rank not in forgiven]
    stacks = _stacks(hung) if hung else []
    others = " (perhaps because of the failure above)" if any(r.fault for r in ranks) else ""
    for r, stack in zip(hung, stacks, strict=True):
        state = "did not exit after returning" if r.returned else "hung" if r.ready else "did not start"
        r.blame(f"{state}{others}\n{stack}", _HUNG, 0.0)


def _stacks(ranks: list[_Rank]) -> list[str]:
    for r in ranks:
        assert r.process.pid is not None
        with suppress(ProcessLookupError):
            os.kill(r.process.pid, _STACK_SIGNAL)
    give_up = time.monotonic() + _SETTLE_SECONDS
    before, texts = None, [""] * len(ranks)
    while (not all(texts) or texts != before) and time.monotonic() < give_up:
        wait([r.process.sentinel for r in ranks], 0.05)
        before, texts = texts, [r.stack_path.read_text() if r.stack_path.exists() else "" for r in ranks]
    return [text or "(no stack: the process does not answer signals, it may be stopped)" for text in texts]


def _reap(ranks: list[_Rank]) -> None:
    for r in ranks:
        r.process.terminate()
    give_up = time.monotonic() + _SETTLE_SECONDS
    for r in ranks:
        r.process.join(max(0.0, give_up - time.monotonic()))
        r.process.kill()  # stopped, or deaf to SIGTERM; nothing happens to one that ended
        r.process.join()
        r.process.close()
        r.pipe.close()


def _raise_faults(ranks: list[_Rank]) -> None:
    __tracebackhide__ = True
    guilty = sorted((r for r in ranks if r.fault), key=lambda r: r.fault_order)
    if guilty:
        head = f"{len(guilty)} of {len(ranks)} ranks failed, the likely cause first"
        raise RankFailure("\n\n".join([head, *(r.fault for r in guilty)]), tuple(r.rank for r in guilty))
