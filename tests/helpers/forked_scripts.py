"""Python scripts run in children of the fork server, which has torch loaded: a start costs a tenth of a new Python."""

import importlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import NoReturn

from tests.helpers.fork_server import fork_server
from tests.helpers.forked_children import fork_children
from tests.helpers.script_process import enter, run_and_leave


@dataclass(frozen=True)
class Script:
    """What a child runs: ``command`` is ``FILE ...``, ``-m MODULE ...`` or ``-c CODE ...``.

    ``forks_children``: the Python processes it starts are forked, too, with the modules ``preloaded``.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: str
    output: str
    errors: str
    forks_children: bool = False
    preloaded: tuple[str, ...] = ()


def run_forked(scripts: Sequence[Script], limit_seconds: float, *, end_together: bool) -> list[int]:
    """The exit codes of scripts that run at the same time.

    ``end_together``: after a failure the others get SIGTERM.

    Raises:
        subprocess.TimeoutExpired: not all ended in time; all got SIGTERM, and were killed if that did not end them.
    """
    processes = [fork_server().Process(target=_run, args=(script,)) for script in scripts]
    for process in processes:
        process.start()
    try:
        if not _await(processes, limit_seconds, end_together):
            _end(processes)
            raise subprocess.TimeoutExpired(scripts[0].command, limit_seconds, Path(scripts[0].output).read_bytes())
    finally:
        for process in processes:
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.close()
    return [code if code is not None else -signal.SIGKILL for code in codes]


def _await(processes: Sequence[ForkServerProcess], limit_seconds: float, end_together: bool) -> bool:
    """Whether all ended in time, or one failed and the others were told to end."""
    deadline = time.monotonic() + limit_seconds
    while running := [process for process in processes if process.is_alive()]:
        if time.monotonic() > deadline:
            return False
        wait([process.sentinel for process in running], 1.0)
        if end_together and any(process.exitcode for process in processes):
            _end(running)
            break
    return True


def _end(processes: Sequence[ForkServerProcess]) -> None:
    """As torchrun does after a failure: SIGTERM, and time to leave."""
    for process in processes:
        process.terminate()
    give_up = time.monotonic() + 30.0
    for process in processes:
        process.join(max(0.0, give_up - time.monotonic()))


def _run(script: Script) -> NoReturn:
    """Child: become the script."""
    for path, end in ((script.output, 1), (script.errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, end)
        os.close(file)
    enter(script.environment, script.cwd)
    for module in script.preloaded:
        importlib.import_module(module)
    if script.forks_children:
        fork_children()
    run_and_leave(script.command)
