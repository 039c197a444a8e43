"""A function run on several real ranks; a failure names the rank that is to blame.

One process per rank, gloo over a file store. A process tells its parent "ready", "returned" or "raised"; a hung one
writes its stack when signalled. Processes are kept for further jobs while they are as they were before the job.
"""

import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tests.helpers import processes, transports
from tests.helpers.rank_pool import RankProcess, pool
from tests.helpers.rank_process import STACK_SIGNAL, Job

# Set: says on stderr why processes are not kept.
_EXPLAIN = "EXPLAIN_RANK_PROCESSES"
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
    """What the parent knows about one rank of a job. ``ended``: its process, or its job in a process that stays."""

    rank: int
    host: RankProcess
    ready: bool = False
    ended: bool = False
    returned: bytes | None = None
    changes: list[str] | None = None  # left in the process; None: not known, the process must end
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
    fresh: bool = False,
) -> list[Any]:
    """Return ``[fn(0, *args), fn(1, *args), ...]``, each call made on its own rank of a gloo group.

    ``fn`` is a module-level function or a :func:`functools.partial` of one. Arguments and results
    travel by value. Warnings on a rank are errors, also those that the library logs instead. Changes
    a test makes to ``os.environ`` do not reach the ranks. The clock of ``timeout_seconds`` starts when
    the group is up on every rank, and again for the end of the job once every result is there. Limits grow with the
    load of the machine.

    The transport of the ranks is the one of the test (``tests/helpers/transports.py``), by environment variable.

    Processes may have run other jobs. ``fresh=True``: new ones, which must exit in order after the job.

    Ranks in ``lost`` may die, hang or be killed: their result is then ``None``. They are not waited
    for once the others are done; an exception on them still fails. The others must exit by themselves,
    with code 0 and soon; ``survivors_exit=False`` forgives those that returned but cannot exit. Processes
    are fresh.

    ``store``: ``"file"``, or ``"rank0"`` for a TCP store that lives in rank 0 and is lost with it, as
    under a launcher without a store of its own. Processes are fresh.

    Raises:
        RankFailure: a rank raised, died, hung, or returned but did not exit.
    """
    __tracebackhide__ = True
    call = pickle.dumps((fn, args))
    is_last = fresh or bool(lost) or store != "file"
    with tempfile.TemporaryDirectory(prefix="ranks-") as directory:
        taken = pool.take(world_size, transports.device(), fresh=is_last)
        ranks = [_Rank(rank, process) for rank, process in enumerate(taken)]
        try:
            for r in ranks:
                with suppress(OSError):  # it is dead, which its sentinel reports
                    r.host.send(
                        Job(r.rank, world_size, call, store, Path(directory), is_last, transports.environment())
                    )
            slow = processes.slowness()
            _watch(ranks, slow * timeout_seconds, slow * start_seconds, lost, survivors_exit)
            _blame_hung(ranks, lost, survivors_exit)
        finally:
            _settle(ranks)
    _raise_faults(ranks)
    return [None if r.returned is None else pickle.loads(r.returned) for r in ranks]


def _settle(ranks: list[_Rank]) -> None:
    """Keep the processes that are as they were before the job, and end the others."""
    is_faulty = any(r.fault for r in ranks)
    for r in ranks:
        if is_faulty or r.changes is None:
            r.host.kill()  # nothing happens to one that ended
        elif not r.changes:
            pool.give_back(r.host)
        else:
            if os.environ.get(_EXPLAIN):
                print(f"rank {r.rank} is not kept: {r.changes}", file=sys.stderr)
            _note_exit(r, r.host.end())


# What the parent sees of the ranks: messages, ends, deadlines, and the rank to blame


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
        if now >= deadline or (stage == "settle" and not failed and all(_is_stopped(r) for r in running)):
            return
        ends = [r.host.process.sentinel for r in running]
        wait([*ends, *(r.host.pipe for r in running if not r.host.pipe.closed)], deadline - now)
        for r in running:
            _listen(r, lost)


def _is_stopped(r: _Rank) -> bool:
    """Whether the process cannot end: it gets no time until somebody continues it."""
    return processes.state(r.host.process.pid) == "T"


def _release(ranks: Iterable[_Rank]) -> None:
    for r in ranks:
        with suppress(OSError):  # it died meanwhile, which its sentinel reports
            r.host.pipe.send_bytes(b"go")


def _listen(r: _Rank, lost: Collection[int]) -> None:
    """Read what the rank said and whether its process ended."""
    is_dead = not r.host.process.is_alive()  # asked first: all a dead rank said is in the pipe by now
    try:
        while not r.host.pipe.closed and r.host.pipe.poll():
            _note(r, *pickle.loads(r.host.pipe.recv_bytes()))
    except (EOFError, OSError):
        r.host.pipe.close()
    r.ended = is_dead or r.changes is not None
    if is_dead and r.rank not in lost:
        _note_exit(r, r.host.process.exitcode)


def _note_exit(r: _Rank, code: int | None) -> None:
    """Blame a rank whose process did not end in order: it returned, and its exit code is 0."""
    if code == 0 and r.returned is not None:
        return
    if code is None:
        r.blame("did not exit after returning", _HUNG, time.monotonic())
        return
    when = "after returning" if r.returned is not None else "before returning"
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    r.blame(f"died {when}: {how}", _CAUSE, time.monotonic())


def _note(r: _Rank, kind: str, payload: Any, at: float) -> None:
    if kind == "ready":
        r.ready = True
    elif kind == "returned":
        r.returned = payload
    elif kind == "settled":
        r.changes = payload
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
        with suppress(ProcessLookupError):
            os.kill(r.host.process.pid, STACK_SIGNAL)
    give_up = time.monotonic() + _SETTLE_SECONDS
    before, texts = None, [""] * len(ranks)
    while (not all(texts) or texts != before) and time.monotonic() < give_up:
        wait([r.host.process.sentinel for r in ranks], 0.05)
        before, texts = texts, [r.host.stack_path.read_text() if r.host.stack_path.exists() else "" for r in ranks]
    return [text or "(no stack: the process does not answer signals, it may be stopped)" for text in texts]


def _raise_faults(ranks: list[_Rank]) -> None:
    """Raises: RankFailure: a rank has a fault."""
    __tracebackhide__ = True
    guilty = sorted((r for r in ranks if r.fault), key=lambda r: r.fault_order)
    if guilty:
        head = f"{len(guilty)} of {len(ranks)} ranks failed, the likely cause first"
        raise RankFailure("\n\n".join([head, *(r.fault for r in guilty)]), tuple(r.rank for r in guilty))
