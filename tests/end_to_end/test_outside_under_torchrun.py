"""Jobs that torchrun starts, restarts and ends: the root cause, Ctrl-C, and waits outside of the calls of the library.

Run as a script, this file is one rank: ``test_outside_under_torchrun.py STORY FOLDER``.
"""

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import redirect_stderr, redirect_stdout
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from legacy_ddp import Checks, LegacyDDPError, LegacyDistributedDataParallel
from legacy_ddp.debug._cli import main
from tests.helpers.hosts import Hosts
from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_script
from tests.helpers.tiers import count, thorough

RANKS = 3
RUNS = count(20, 1)
WARN_SECONDS = 1.0
# Of a large process: workers of a loader to join, memory to free. torchrun looks ten times a second.
SLOW_END_SECONDS = 3.0
# Measured is about one; torchrun itself waits thirty before it kills.
CTRL_C_SECONDS = 15.0
# By story: the rank that torchrun shall name. All ranks show an error on which they agree; rank 0 is the first.
ROOT_CAUSES = {"raises": 1, "is killed": 1, "fails in the call": 1, "disagrees": 0}
TOLD = "; rank 0 is not there: at "


def _train(story: str, folder: Path) -> bool:
    """Whether the script has to say by its exit status that the training failed."""
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    if rank == ROOT_CAUSES.get(story):
        atexit.register(time.sleep, SLOW_END_SECONDS)  # registered first: runs last
    # torchrun keeps its store for a restart, and gloo then finds the addresses of the first start.
    store = {"init_method": f"file://{folder}/store-{attempt}", "rank": rank, "world_size": RANKS}
    dist.init_process_group("gloo", **(store if story == "restarts" else {}))
    model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1), checks=Checks(warn_after_seconds=WARN_SECONDS))
    for _ in range(3):
        model(torch.full((1, 2), 1.0 + rank)).sum().backward()
        model.all_reduce()
        model.zero_grad()
    if story == "raises" or (story == "restarts" and attempt == 0):
        try:
            dist.all_gather_object([None] * RANKS, _evaluate(rank))
        finally:
            dist.destroy_process_group()  # closes the connections to the ranks that gather
    if story == "hangs" or story in ROOT_CAUSES:
        return _fails_in_a_call(story, rank, model)
    if rank == 0:
        time.sleep(3 * WARN_SECONDS)  # the others wait
        if story == "restarts":
            with (folder / "watch.txt").open("w") as output, redirect_stdout(output), redirect_stderr(output):
                main(["watch", "--json"])
            (folder / "sockets.txt").write_text(" ".join(path.name for path in folder.glob("legacy_ddp-*/*")))
    dist.barrier()
    time.sleep(3 * WARN_SECONDS)  # for the line that the wait has ended
    dist.destroy_process_group()
    return False


def _evaluate(rank: int) -> int:
    if rank == 1:
        raise ValueError("bad batch 17")
    return rank


def _fails_in_a_call(story: str, rank: int, model: torch.nn.Module) -> bool:
    """Whether the script goes on after the error, to its end."""
    model(torch.full((1, 2), 1.0 + rank)).sum().backward()
    if story == "hangs":
        # One write: text and newline apart would mix with those of the others on the same pipe.
        os.write(1, f"in process {os.getpid()}\n".encode())
    if rank == 1 and story == "hangs":
        threading.Event().wait()
    if rank == 1 and story == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sizes = {"fails in the call": -1, "disagrees": 1}
    try:
        model.all_reduce(sample_size=sizes.get(story) if rank == 1 else None)
    except LegacyDDPError as error:
        if story == "is killed":
            raise SystemExit(1) from error
        if story == "disagrees":
            raise ValueError("training failed") from error  # shows the traceback
    return True


def _command(story: str, folder: Path, *options: str) -> tuple[str, ...]:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS), *options)
    return (*launch, __file__, story, str(folder))


def _run(story: str, folder: Path, *options: str) -> tuple[int, str]:
    job = fork_script(*_command(story, folder, *options), forks_children=True)
    return job.returncode, job.stderr


def _told(text: str) -> list[str]:
    """What the library has said, with whole sentences."""
    return re.findall(r"WARNING legacy_ddp rank \d: (.*?)(?=\n\S|\n\n|\Z)", text, re.DOTALL)


@pytest.mark.slow
@pytest.mark.parametrize("story", ["raises", thorough("is killed"), thorough("fails in the call"), "disagrees"])
def test_the_rank_at_fault_is_the_root_cause_for_torchrun_however_slowly_it_ends(story: str, tmp_path: Path) -> None:
    """It was any rank: all of them ended within a tenth of a second, and torchrun names the lowest of these."""
    roots = []
    for number in range(RUNS):
        (folder := tmp_path / str(number)).mkdir()
        status, text = _run(story, folder)
        root = re.search(r"Root Cause.*?rank +: (\d+)", text, re.DOTALL)
        assert status == 1, text
        roots.append(root and root[1])

    assert roots == [str(ROOT_CAUSES[story])] * RUNS


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("whom", ["torchrun alone", "the whole group, as a terminal does"])
def test_ctrl_c_ends_the_job_in_seconds_and_leaves_no_process(whom: str, tmp_path: Path) -> None:
    job = subprocess.Popen(
        [sys.executable, *_command("hangs", tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert job.stdout is not None
        begun = (line for line in job.stdout if line.startswith("in process "))
        pids = [int(line.split()[-1]) for line in islice(begun, RANKS)]
        (os.kill if whom == "torchrun alone" else os.killpg)(job.pid, signal.SIGINT)
        job.communicate(timeout=CTRL_C_SECONDS)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_job_that_torchrun_has_restarted_is_watched_without_a_trace_of_the_first_start(tmp_path: Path) -> None:
    status, text = _run("restarts", tmp_path, "--max-restarts", "1")
    before, _, after = text.partition("bad batch 17, at ")

    assert status == 0, text
    assert "rank 1 left after all_reduce() call 3 with ValueError: " in before
    (job,) = json.loads((tmp_path / "watch.txt").read_text())["jobs"]
    assert (job["size"], job["missing"]) == (RANKS, [0])
    assert sorted((tmp_path / "sockets.txt").read_text().split()) == sorted(map(str, job["pids"]))
    told = [one for one in _told(after) if "this rank ends because" not in one]
    assert re.match(r"outside of calls: ranks 1-2 have waited \d+ s in barrier\(\)", " ".join(told[0].split())), text
    assert TOLD in " ".join(told[0].split())
    assert told[-1].startswith("the wait outside of calls has ended")
    assert list(tmp_path.glob("legacy_ddp-*/*")) == []


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.hosts
def test_a_wait_outside_of_calls_is_shown_once_on_every_host(tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        results = hosts.torchrun(__file__, "waits", str(tmp_path), nproc_per_node=2).wait(120.0)

    for result in results:
        told = [" ".join(one.split()) for one in _told(result.text)]
        in_full = [one for one in told if TOLD in one and not one.endswith(", as reported")]
        assert len(in_full) == 1, result.text
        assert in_full[0].startswith("outside of calls: ranks 1-3 have waited ")
        assert told.count("the wait outside of calls has ended") == 1


if __name__ == "__main__":
    sys.exit(_train(sys.argv[1], Path(sys.argv[2])))
