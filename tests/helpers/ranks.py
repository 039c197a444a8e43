"""A function run on several real ranks; a failure names the rank that is to blame.

One process per rank, gloo over a file store. A process tells its parent "ready", "returned" or "raised"; a hung one
writes its stack when signalled. Processes are kept for further jobs while they are as they were before the job.
"""

import os
import pickle
import sys
import tempfile
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.helpers import transports
from tests.helpers.rank_pool import pool
from tests.helpers.rank_process import Job
from tests.helpers.rank_watch import Rank, RankFailure, blame_hung, note_exit, raise_faults, watch

__all__ = ["RankFailure", "run_ranks", "slowness"]

# Set: says on stderr why processes are not kept.
_EXPLAIN = "EXPLAIN_RANK_PROCESSES"


def slowness() -> float:
    """By how much limits of time grow with the load of the machine: they are for hanging, not for waiting."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


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
        processes = pool.take(world_size, transports.device(), fresh=is_last)
        ranks = [Rank(rank, process) for rank, process in enumerate(processes)]
        try:
            for r in ranks:
                with suppress(OSError):  # it is dead, which its sentinel reports
                    r.host.send(
                        Job(r.rank, world_size, call, store, Path(directory), is_last, transports.environment())
                    )
            slow = slowness()
            watch(ranks, slow * timeout_seconds, slow * start_seconds, lost, survivors_exit)
            blame_hung(ranks, lost, survivors_exit)
        finally:
            _settle(ranks)
    raise_faults(ranks)
    return [None if r.returned is None else pickle.loads(r.returned) for r in ranks]


def _settle(ranks: list[Rank]) -> None:
    """Keep the processes that are as they were before the job, and end the others."""
    is_faulty = any(r.fault for r in ranks)
    kept = [] if is_faulty else [r for r in ranks if r.changes == []]
    for r in kept:
        pool.give_back(r.host)
    changed = [] if is_faulty else [r for r in ranks if r.changes]
    for r in changed:
        if os.environ.get(_EXPLAIN):
            print(f"rank {r.rank} is not kept: {r.changes}", file=sys.stderr)
        note_exit(r, r.host.end())
    for r in ranks:
        if r not in kept and r not in changed:
            r.host.kill()  # nothing happens to one that ended
