"""Scripts started as a user does, or quickly from a process that has torch loaded, and what they leave compared."""

import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.helpers.fork_server import fork_server
from tests.helpers.forked_children import enter, fork_children, run_and_leave
from tests.helpers.paths import ROOT
from tests.helpers.processes import slowness

# Python scripts run in children of the fork server, which has torch loaded: a start costs a tenth of a new Python


_ENDS = {1: ".output", 2: ".errors"}


@dataclass(frozen=True)
class _Script:
    """What a child runs: see :func:`fork_scripts`. ``said``: the file of its output, without the suffix."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    cwd: str
    said: str
    forks_children: bool = False
    preloaded: tuple[str, ...] = ()

    def run(self) -> NoReturn:
        """Child: become the script."""
        for end, suffix in _ENDS.items():
            file = os.open(self.said + suffix, os.O_WRONLY | os.O_APPEND)
            os.dup2(file, end)
            os.close(file)
        enter(self.environment, self.cwd)
        for module in self.preloaded:
            importlib.import_module(module)
        if self.forks_children:
            fork_children()
        run_and_leave(self.command)

    def completed(self, code: int) -> subprocess.CompletedProcess[str]:
        said = (Path(self.said + suffix).read_text() for suffix in _ENDS.values())
        return subprocess.CompletedProcess(self.command, code, *said)


def _run(scripts: Sequence[_Script], limit_seconds: float, *, end_together: bool) -> list[int]:
    """The exit codes of scripts that run at the same time.

    ``end_together``: after a failure the others get SIGTERM.

    Raises:
        subprocess.TimeoutExpired: not all ended in time; all got SIGTERM, and were killed if that did not end them.
    """
    for script, suffix in product(scripts, _ENDS.values()):
        Path(script.said + suffix).touch()
    processes = [fork_server().Process(target=script.run) for script in scripts]
    for process in processes:
        process.start()
    try:
        if not _await(processes, limit_seconds, end_together):
            _end(processes)
            raise subprocess.TimeoutExpired(scripts[0].command, limit_seconds, scripts[0].completed(1).stdout.encode())
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
    start = time.monotonic()
    while running := [process for process in processes if process.is_alive()]:
        if time.monotonic() - start > limit_seconds * slowness():
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


_SETTINGS = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
EXAMPLES = ROOT / "examples"
LIMIT_SECONDS = 300  # several times what the longest takes: other tests run beside it


def run_script(
    *command: str,
    environment: Mapping[str, str] | None = None,
    limit_seconds: float = LIMIT_SECONDS,
    cwd: Path = ROOT,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={**os.environ, **_SETTINGS, **(environment or {})},
        text=True,
        timeout=limit_seconds * slowness(),
        check=False,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


def fork_script(
    *command: str, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """``FILE ...``, ``-m MODULE ...`` or ``-c CODE ...`` in a child that has torch loaded.

    Where the start is not what is tested. ``options`` are those of :func:`fork_scripts`.
    """
    (run,) = fork_scripts([command], [environment or {}], **options)
    return run


def fork_scripts(
    commands: Sequence[tuple[str, ...]],
    environments: Sequence[Mapping[str, str]],
    *,
    limit_seconds: float = LIMIT_SECONDS,
    cwd: Path = ROOT,
    forks_children: bool = False,
    preloaded: tuple[str, ...] = (),
) -> list[subprocess.CompletedProcess[str]]:
    """The same of several scripts at the same time, each with variables of its own.

    ``forks_children``: the Python processes that they start are forked, too, with the modules ``preloaded``.
    """
    with tempfile.TemporaryDirectory() as folder:
        scripts = [
            _Script(
                command,
                {**os.environ, **_SETTINGS, **variables},
                str(cwd),
                f"{folder}/{number}",
                forks_children,
                preloaded,
            )
            for number, (command, variables) in enumerate(zip(commands, environments, strict=True))
        ]
        codes = _run(scripts, limit_seconds, end_together=False)
        return [script.completed(code) for script, code in zip(scripts, codes, strict=True)]


def fork_ranks(
    world_size: int,
    *command: str,
    environment: Mapping[str, str] | None = None,
    limit_seconds: float = LIMIT_SECONDS,
    cwd: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """The script on ``world_size`` ranks, with what torchrun sets, where torchrun itself is not what is tested."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "tests"}
    job |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(world_size))
    places = [dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)) for rank in range(world_size)]
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, **_SETTINGS, **job, **(environment or {})}
        scripts = [_Script(command, {**variables, **place}, str(cwd), f"{folder}/all") for place in places]
        codes = _run(scripts, limit_seconds, end_together=True)
        return scripts[0].completed(next((code for code in codes if code), 0))


def heed_ctrl_c() -> None:
    """In a child, before it starts: hear SIGINT although whoever started the tests in the background ignores it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def fork_torchrun(world_size: int, script: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """An example, or a script by its whole path, as a user starts it, but torchrun and its ranks are forked."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size))
    return fork_script(*launcher, str(EXAMPLES / script), *arguments, forks_children=True, **options)


def example(world_size: int, script: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """One of the examples on several ranks, quickly."""
    return fork_ranks(world_size, str(EXAMPLES / script), *arguments, **options)


def load(path: Path) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def assert_same_bits(left: Any, right: Any, where: str = "checkpoint") -> None:
    assert type(left) is type(right), where
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8)), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same_bits(left[key], right[key], f"{where}[{key!r}]")
    elif isinstance(left, list):
        assert len(left) == len(right), where
        for index, pair in enumerate(zip(left, right, strict=True)):
            assert_same_bits(*pair, f"{where}[{index}]")
    else:
        assert left == right, where
