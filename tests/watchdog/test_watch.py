"""``legacy-ddp watch`` beside jobs of real ranks, and as a command."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from legacy_ddp._watchdog.local import FORMAT, folder_of
from tests.helpers.listening import Training, listen, said
from tests.helpers.paths import ROOT
from tests.helpers.processes import open_files
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import heed_ctrl_c
from tests.helpers.watching import a_job, a_row, described, moving, wait_for, waiting_ranks, watch_command

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="needs SO_PEERCRED")

CALM_SECONDS = 600.0  # no wait of a test is that long


def _await_job(is_expected: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The only job, once it is as expected."""

    def look() -> dict[str, Any] | None:
        jobs = json.loads(watch_command("--json")[1])["jobs"]
        return jobs[0] if len(jobs) == 1 and is_expected(jobs[0]) else None

    found: dict[str, Any] = wait_for(look)
    return found


def _run(function: Callable[..., Any], world_size: int, folder: Path) -> list[Any]:
    return run_ranks(partial(listen, function, folder), world_size, fresh=True)


def _train(folder: Path, process_group: Any = None) -> Training:
    """A training whose sockets are in ``folder``."""
    tempfile.tempdir = str(folder)
    return Training(folder, process_group=process_group, warn_after_seconds=CALM_SECONDS)


def _in_barrier_and_call(rank: int, folder: Path) -> Any:
    """Ranks 0 and 1 have a group of their own, too; each process answers for the largest, and has one socket."""
    pair, found = dist.new_group([0, 1]), None
    training = _train(folder)
    if rank < 2:
        _train(folder, pair)
    else:
        job = _await_job(lambda job: waiting_ranks(job) == [0, 1])
        found = job, len(os.listdir(folder_of(os.geteuid()))), watch_command(), watch_command("--stacks")
    dist.barrier()
    if rank == 2:
        found += (_await_job(lambda job: waiting_ranks(job) == [0, 1] and job["summary"].startswith("all_reduce()")),)
    training.step()
    return found


def test_ranks_that_wait_in_a_barrier_or_a_call_are_told_with_the_rank_that_is_not_there(tmp_path: Path) -> None:
    job, sockets, (status, text, errors), (_, stacks, _), in_call = _run(_in_barrier_and_call, 3, tmp_path)[2]

    assert (job["state"], job["missing"], job["size"], sockets) == ("waiting", [2], 3, 3)
    assert [row["ranks"] for row in job["rows"]] == [[2], [0, 1]]
    assert job["rows"][1]["doing"] == "barrier() after all_reduce() call 2"
    assert "ranks 0-1 have waited" in job["summary"]
    assert "rank 2 is not there: at" in job["summary"]
    assert (status, errors) == (0, "")
    assert re.search(r"^ 0-1  barrier\(\) after all_reduce\(\) call 2  waits ", text, re.MULTILINE), text
    assert max(map(len, text.splitlines())) <= 80
    _, _, of_barrier = stacks.partition("stack of ranks 0-1, innermost last:")
    assert "in barrier" in of_barrier
    assert "stack of" not in text
    assert in_call["missing"] == [2]
    assert in_call["summary"].startswith("all_reduce() call 3, phase agree: ranks have waited for")
    waiting = [(row["doing"], row["ranks"]) for row in in_call["rows"] if row["state"] == "waits"]
    assert waiting == [("all_reduce() call 3: agree", [0, 1])]
    assert [line for rank in range(3) for line in said(tmp_path, rank)] == []
    assert not (tmp_path / f"legacy_ddp-{os.geteuid()}").exists()


def _in_its_loop(rank: int, folder: Path) -> Any:
    training = _train(folder)
    found: list[dict[str, Any]] = []
    thread = None
    if rank == 0:
        thread = threading.Thread(target=lambda: found.append(_await_job(lambda job: _goes_on(job) == [0, 1])))
        thread.start()
    is_over = False
    while not is_over:
        training.model(torch.full((3, 4), 1.0 + rank)).sum().backward()
        has_found = thread is not None and not thread.is_alive()
        is_over = training.model.all_reduce(metrics={"stop": int(has_found)}).metrics["stop"] != 0
        training.optimizer.step()
        training.optimizer.zero_grad()
    return found


def _goes_on(job: dict[str, Any]) -> list[int]:
    return [rank for row in job["rows"] if row["doing"] == "its loop goes on" for rank in row["ranks"]]


def test_a_job_that_moves_is_one_row_with_the_seconds_of_a_step(tmp_path: Path) -> None:
    (job,) = _run(_in_its_loop, 2, tmp_path)[0]

    assert (job["state"], job["seconds"], job["missing"], job["summary"]) == ("moving", None, [], "")
    (row,) = job["rows"]
    assert (row["ranks"], row["state"], row["seconds"]) == ([0, 1], "moving", [None, None])
    assert all(seconds > 0 for seconds in row["step_seconds"])


def _two_jobs(rank: int, folder: Path) -> Any:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    _train(folder, groups[rank // 2])
    dist.barrier()
    found = None
    if rank == 3:
        found = watch_command(), watch_command(os.getpid()), watch_command("--json"), os.getpid()
    dist.barrier()
    return found


def test_several_jobs_are_a_table_and_a_process_chooses_one(tmp_path: Path) -> None:
    (status, table, _), (_, one, _), (_, data, _), pid = _run(_two_jobs, 4, tmp_path)[3]

    assert status == 0
    rows = table.splitlines()
    assert rows[0].split() == ["pid", "ranks", "hosts", "call", "state"]
    assert [row.split()[1:3] for row in rows[1:-2] if row[:8].strip()] == [["2", "1"]] * 2  # without texts of waits
    assert rows[-1] == "legacy-ddp watch PID shows one of them"
    jobs = json.loads(data)["jobs"]
    assert [len(job["pids"]) for job in jobs] == [2, 2]
    (own,) = [job for job in jobs if pid in job["pids"]]
    assert one.startswith(f"2 ranks on {own['hosts'][0]}, process {own['pid']}: ")


def _with_a_child(rank: int, folder: Path) -> Any:
    training = _train(folder)
    path = folder_of(os.geteuid()) / str(os.getpid())
    begun, begins = os.pipe()
    ended, ends = os.pipe()
    child = os.fork()
    if not child:
        os.close(ends)
        unix = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines() if line.endswith(str(path))}
        own = [link for link in open_files() if link.removeprefix("socket:[").rstrip("]") in unix]
        os.write(begins, b"copy" if own else b"none")
        os.read(ended, 1)
        os._exit(0)
    copies = os.read(begun, 4)
    before = watch_command()[0], path.exists()
    os.close(ends)
    os.waitpid(child, 0)
    after = watch_command()[0], path.exists()
    training.step()
    return copies, before, after


def test_a_forked_child_holds_no_copy_of_the_socket_and_leaves_the_file(tmp_path: Path) -> None:
    assert _run(_with_a_child, 2, tmp_path) == [(b"none", (0, True), (0, True))] * 2


def test_the_command_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from legacy_ddp.debug._cli import main; sys.exit(main(sys.argv[1:]))"
    )
    with a_job(described(moving(0), moving(1))):
        done = subprocess.run(
            [sys.executable, "-c", code, "watch"], cwd=ROOT, capture_output=True, text=True, timeout=120
        )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].split() == ["0-1", "its", "loop", "goes", "on", "moving", "250", "ms"]


def test_every_shows_the_table_again_until_ctrl_c_which_is_quiet(folder: Path) -> None:
    command = [sys.executable, "-m", "legacy_ddp", "watch", "--every", "0.01"]
    with (
        a_job(described(moving(0), moving(1)), described(a_row(0), a_row(1, serial=4, in_call=False))),
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heed_ctrl_c
        ) as process,
    ):
        assert process.stdout is not None
        heads = [line for _ in range(20) if "ranks on" in (line := process.stdout.readline())]
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)

    assert [head.rpartition(": ")[2].strip() for head in heads][:2] == ["moving", "waits for 2.0 s"]
    assert (process.returncode, errors) == (130, "")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_sees_the_jobs_of_all_users_and_leaves_out_a_folder_that_somebody_else_made(folder: Path) -> None:
    (folder.parent / "legacy_ddp-4242").mkdir(0o700)
    with a_job(described(moving(0), moving(1))):
        status, text, errors = watch_command()

    assert (status, text.splitlines()[0]) == (0, f"2 ranks on vm, process {os.getpid()}: moving")
    assert "legacy_ddp-4242 is of another user: got user 0, expected 4242" in errors


def test_a_process_that_is_no_rank_or_of_another_version_or_does_not_answer_is_named(folder: Path) -> None:
    def error(*arguments: int) -> str:
        status, text, errors = watch_command(*arguments)
        assert (status, text) == (2, "")
        return " ".join(errors.split())

    with a_job(described(moving(0), moving(1))):
        assert f"process 1 is no rank of a job here: expected a rank, such as {os.getpid()}" in error(1)
    with a_job({"format": FORMAT + 1, "rows": "something else"}):
        assert f"no rank of the job of process {os.getpid()} answers" in error()
    folder.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / "4711"))
        silent.listen()
        assert "no job answers: process 4711 does not answer" in error()
