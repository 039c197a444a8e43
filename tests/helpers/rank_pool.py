"""Processes that run ranks: forked from a server that has torch loaded, kept while jobs leave them unchanged."""

import itertools
import pickle
import shutil
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
        """``count`` processes, new ones where ``fresh`` or none is left.

        Raises:
            AssertionError: a process died between two jobs: a job broke it after all its assertions.
        """
        taken: list[RankProcess] = []
        while not fresh and self._idle and len(taken) < count:
            process = self._idle.pop()
            code = process.process.exitcode
            assert code is None, (
                f"a rank died after {process.jobs} jobs: got exit code {code}, expected a waiting process"
            )
            taken.append(process)
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
    folder = tempfile.mkdtemp(prefix="rank-processes-")
    # Not a TemporaryDirectory, which a forked child of this process would remove at its own end. Finalize looks at the
    # process: this one removes the folder after the pool is closed, and closes the pool before multiprocessing joins
    # its children, which wait for jobs.
    Finalize(None, shutil.rmtree, (folder,), exitpriority=-10)
    Finalize(None, pool.close, exitpriority=10)
    return folder
