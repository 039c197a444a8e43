"""Faults of a rank under Lightning: the job ends, the error names the rank, and no process stays."""

import os
import signal
from functools import cache
from pathlib import Path
from subprocess import CompletedProcess
from tempfile import TemporaryDirectory

import pytest

from tests.helpers.lightning_scenarios import LOADED, needs_lightning
from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_script, fork_scripts

pytestmark = needs_lightning

FAULTS = str(ROOT / "tests" / "helpers" / "lightning_faults.py")
JOBS = (("trainer", "raise"), ("trainer", "hang"), ("fabric", "hang"))


@cache
def ended() -> dict[tuple[str, str], tuple[CompletedProcess[str], bool]]:
    """All jobs, at the same time, because they wait most of it; whether the process that was rank 1 is gone."""
    with TemporaryDirectory() as folder:
        folders = [Path(folder, "-".join(job)) for job in JOBS]
        for mine in folders:
            mine.mkdir()
        commands = [(FAULTS, str(mine), *job) for mine, job in zip(folders, JOBS, strict=True)]
        try:
            runs = fork_scripts(commands, [{}] * len(JOBS), forks_children=True, preloaded=LOADED)
        finally:
            gone = [_end(mine / "pid-1") for mine in folders]
    return dict(zip(JOBS, zip(runs, gone, strict=True), strict=True))


def _end(pid_file: Path) -> bool:
    """Whether the process was gone already; it is afterwards."""
    try:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.thorough
def test_an_exception_on_one_rank_is_shown_and_ends_the_other() -> None:
    job, is_gone = ended()["trainer", "raise"]

    assert "ValueError: planted on rank 1" in job.stderr
    assert is_gone
    # Lightning's observer kills rank 0 if it looks, every five seconds, between the end of rank 1 and our error.
    assert job.returncode == -signal.SIGKILL or (
        job.returncode == 1 and "PeerLostError: " in job.stderr and "missing rank 1" in job.stderr
    ), job


@pytest.mark.parametrize("framework", ["trainer", "fabric"])
@pytest.mark.thorough
def test_a_rank_that_hangs_is_named_with_its_line_and_does_not_outlive_the_job(framework: str) -> None:
    job, is_gone = ended()[framework, "hang"]

    assert job.returncode == 1, job
    assert "SyncTimeoutError: " in job.stderr
    assert "no answer within 6 s; missing rank 1" in job.stderr
    assert "in happen" in job.stderr  # the function it hangs in
    assert is_gone


def test_a_process_that_an_exception_ends_takes_those_along_that_it_launched(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    program = f"""
import pathlib, subprocess, sys, types
from legacy_ddp.lightning import set_up_exit
program = "import threading; threading.Event().wait()"
launched = subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
pathlib.Path({str(pid_file)!r}).write_text(str(launched.pid))
set_up_exit(types.SimpleNamespace(procs=[launched]))
raise ValueError("planted")
"""
    result = fork_script("-c", program)

    assert _end(pid_file)
    assert "ValueError: planted" in result.stderr
