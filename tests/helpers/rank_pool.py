"""Processes that run ranks: forked from a server that has torch loaded, kept while jobs leave them unchanged."""

import itertools
import pickle
import tempfile
from functools import cache
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import Finalize
from pathlib import Path

from tests.helpers.fork_server import fork_server
from tests.helpers.rank_process import Job, serve

_numbers = itertools.count()
# How long a process may take to end after its last job.
_EXIT_SECONDS = 20.0


class RankProcess:
    """A process that takes jobs."""

    def __init__(self) -> None:
        self.pipe, theirs = fork_server().Pipe()
        self.stack_path = Path(_directory(), f"stack-{next(_numbers)}")
        self.process: ForkServerProcess = fork_server().Process(target=serve, args=(theirs, self.stack_path))
        self.process.start()
        theirs.close()
        self.jobs = 0

    def send(self, job: Job) -> None:
        self.jobs += 1
        self.pipe.send_bytes(pickle.dumps(job))

    def end(self) -> int | None:
        """Let the process end. Returns its exit code, None if it did not end in time and was killed."""
        self.pipe.close()
        self.process.join(_EXIT_SECONDS)
        code = self.process.exitcode
        self.kill()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()


class RankPool:
    """Processes between two jobs."""

    def __init__(self) -> None:
        self._idle: list[RankProcess] = []

    def take(self, count: int, *, fresh: bool) -> list[RankProcess]:
        """``count`` processes, new ones where ``fresh`` or none is left."""
        taken: list[RankProcess] = []
        while not fresh and self._idle and len(taken) < count:
            process = self._idle.pop()
            if process.process.is_alive():
                taken.append(process)
            else:
                process.kill()
        return taken + [RankProcess() for _ in range(count - len(taken))]

    def give_back(self, process: RankProcess) -> None:
        self._idle.append(process)

    def close(self) -> None:
        """End all processes.

        Raises:
            AssertionError: a process ended in another way than in order: a job broke it after all its assertions.
        """
        codes = [(process.jobs, process.end()) for process in self._idle]
        self._idle.clear()
        broken = [f"{code} after {jobs} jobs" for jobs, code in codes if code != 0]
        assert not broken, f"exit codes of ranks, expected 0 (None: did not end): {broken}"


pool = RankPool()


@cache
def _directory() -> str:
    folder = tempfile.TemporaryDirectory(prefix="rank-processes-")
    Finalize(None, folder.cleanup, exitpriority=-10)  # after pool.close
    Finalize(None, pool.close, exitpriority=10)  # before multiprocessing joins its children, which wait for jobs
    return folder.name
