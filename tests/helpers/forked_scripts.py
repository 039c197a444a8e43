"""Python scripts run in children of the fork server, which has torch loaded: a start costs a tenth of a new Python."""

import atexit
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import torch

from tests.helpers.fork_server import fork_server


@dataclass(frozen=True)
class Script:
    """What a child runs: ``command`` is ``FILE ...`` or ``-m MODULE ...``."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: str
    output: str
    errors: str


def run_forked(scripts: Sequence[Script], limit_seconds: float) -> list[int]:
    """The exit codes of scripts that run at the same time. After a failure the other scripts get SIGTERM.

    Raises:
        subprocess.TimeoutExpired: not all ended in time; all were killed.
    """
    processes = [fork_server().Process(target=_run, args=(script,)) for script in scripts]
    for process in processes:
        process.start()
    try:
        if not _await(processes, limit_seconds):
            raise subprocess.TimeoutExpired(scripts[0].command, limit_seconds, Path(scripts[0].output).read_bytes())
    finally:
        for process in processes:
            process.kill()
            process.join()
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.close()
    return [code if code is not None else -signal.SIGKILL for code in codes]


def _await(processes: Sequence[ForkServerProcess], limit_seconds: float) -> bool:
    """Whether all ended in time, or one failed and the others were told to end."""
    deadline = time.monotonic() + limit_seconds
    while running := [process for process in processes if process.is_alive()]:
        if time.monotonic() > deadline:
            return False
        wait([process.sentinel for process in running], 1.0)
        if any(process.exitcode for process in processes):
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


def _run(script: Script) -> None:
    """Child: become the script."""
    os.environ.clear()
    os.environ.update(script.environment)
    os.chdir(script.cwd)
    for path, end in ((script.output, 1), (script.errors, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, end)
        os.close(file)
    torch.set_num_threads(int(script.environment.get("OMP_NUM_THREADS", 1)))
    torch.seed()  # a new Python does not start with the numbers of the last
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        _run_as_main(script.command)
    except SystemExit:
        raise
    except BaseException:  # noqa: BLE001 - shown as the interpreter shows it; KeyboardInterrupt, too
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
    finally:
        atexit._run_exitfuncs()  # children of multiprocessing leave without them
        sys.stdout.flush()
        sys.stderr.flush()


def _run_as_main(command: Sequence[str]) -> None:
    if command[0] == "-m":
        sys.argv = ["-m", *command[2:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(command)
        sys.path.insert(0, str(Path(command[0]).absolute().parent))
        runpy.run_path(command[0], run_name="__main__")
