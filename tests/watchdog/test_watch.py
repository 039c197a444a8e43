"""``legacy-ddp watch``: the Unix socket of a process, what a job answers, and what the command shows of it."""

import io
import json
import logging
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp._explain.job import describe_job
from legacy_ddp._explain.missing import MAX_ROWS, compose, poll_ranks
from legacy_ddp._watchdog.client import Outcome, encode_message
from legacy_ddp._watchdog.local import FORMAT, REQUEST_BYTES, LocalListener, ask, folder_of
from legacy_ddp._watchdog.process import DEAD, DEBUGGER, RUNNING, STOPPED, Sample
from legacy_ddp._watchdog.server import StatusServer
from legacy_ddp._watchdog.stall import Wait
from legacy_ddp._watchdog.status import PayloadState, RankStatus, Row
from legacy_ddp.debug import _watch
from legacy_ddp.debug._cli import main
from tests.helpers.listening import Training, listen, said
from tests.helpers.paths import ROOT
from tests.helpers.processes import open_files
from tests.helpers.ranks import run_ranks, slowness
from tests.helpers.scripts import heed_ctrl_c
from tests.helpers.status_servers import Answers

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="needs SO_PEERCRED")

CALM_SECONDS = 600.0  # no wait of a test is that long
_PAUSE_SECONDS = 0.05


def _watch_command(*arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the command, in this process."""
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        status = main(["watch", *map(str, arguments)])
    return status, output.getvalue(), errors.getvalue()


def _await(look: Callable[[], Any]) -> Any:
    """The first result of ``look`` that is true."""
    deadline = time.monotonic() + 30 * slowness()
    while not (found := look()):
        assert time.monotonic() < deadline, "what the test waits for did not come"
        time.sleep(_PAUSE_SECONDS)
    return found


def _await_job(is_expected: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The only job, once it is as expected."""

    def look() -> dict[str, Any] | None:
        jobs = json.loads(_watch_command("--json")[1])["jobs"]
        return jobs[0] if len(jobs) == 1 and is_expected(jobs[0]) else None

    found: dict[str, Any] = _await(look)
    return found


def _waiting_ranks(job: dict[str, Any]) -> list[int]:
    return [rank for row in job["rows"] if row["state"] == "waits" for rank in row["ranks"]]


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
        job = _await_job(lambda job: _waiting_ranks(job) == [0, 1])
        found = job, len(os.listdir(folder_of(os.geteuid()))), _watch_command(), _watch_command("--stacks")
    dist.barrier()
    if rank == 2:
        found += (_await_job(lambda job: _waiting_ranks(job) == [0, 1] and job["summary"].startswith("all_reduce()")),)
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
        found = _watch_command(), _watch_command(os.getpid()), _watch_command("--json"), os.getpid()
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
    before = _watch_command()[0], path.exists()
    os.close(ends)
    os.waitpid(child, 0)
    after = _watch_command()[0], path.exists()
    training.step()
    return copies, before, after


def test_a_forked_child_holds_no_copy_of_the_socket_and_leaves_the_file(tmp_path: Path) -> None:
    assert _run(_with_a_child, 2, tmp_path) == [(b"none", (0, True), (0, True))] * 2


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for the sockets of this test, and of the processes that it starts."""
    with tempfile.TemporaryDirectory(prefix="watch-") as path:  # a short path
        monkeypatch.setattr(tempfile, "tempdir", path)
        monkeypatch.setenv("TMPDIR", path)
        yield Path(path, f"legacy_ddp-{os.geteuid()}")


@contextmanager
def _a_job(*answers: dict[str, Any]) -> Iterator[list[Any]]:
    """This process as a rank. Yields the requests. ``answers``: to the requests for the job; the last one stays."""
    requests, left = [], list(answers)

    def answer(connection: socket.socket, message: Any) -> None:
        requests.append(message)
        if message.get("request") == "process":
            said = {"size": 2, "first": [0, "host", 1, "", "", ""], "pids": [os.getpid()]}
        else:
            said = left.pop(0) if len(left) > 1 else left[0]
        with connection, suppress(OSError):
            connection.sendall(encode_message({"format": FORMAT, **said}))

    server = StatusServer(0, lambda _: {}, lambda *_: None, on_local=answer)
    server.start(None)
    try:
        yield requests
    finally:
        server.close("")


def _described(*rows: Row, warn_after_seconds: float = 60.0, with_stacks: bool = False) -> dict[str, Any]:
    return describe_job(rows, range(len(rows)), len(rows), warn_after_seconds, with_stacks=with_stacks)


def _sample(phase: str = "agree", seconds: float = 2.0, **changes: Any) -> Sample:
    return Sample(**{"call": "", "phase": phase, "age_seconds": seconds, "changes": 1, "stack": ("a", "b"), **changes})


def _row(rank: int, **changes: Any) -> Row:
    """A rank that waits in a call."""
    usual = {"sample": _sample(), "serial": 5, "in_call": True, "last_call": "all_reduce() call 5", "is_busy": False}
    return Row(rank, **{"host": "vm", "pid": 100 + rank, "outcome": Outcome.ANSWERED, **usual, **changes})


def _moving(rank: int) -> Row:
    return _row(rank, has_moved=True, is_advancing=True, step_seconds=0.25)


def test_the_folder_and_the_socket_are_of_the_user_alone_and_go_with_the_last_use(folder: Path) -> None:
    first = StatusServer(0, lambda _: {}, lambda *_: None, on_local=lambda *_: None)
    second = StatusServer(0, lambda _: {}, lambda *_: None, on_local=lambda *_: None)
    for server in (first, second):
        server.start(None)

    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [path.name for path in folder.iterdir()] == [str(os.getpid())]
    first.close("")
    assert [path.name for path in folder.iterdir()] == [str(os.getpid())]
    second.close("")
    assert not folder.exists()


def _stale(path: Path) -> None:
    path.parent.mkdir(0o700, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


def test_the_file_of_a_dead_process_is_removed_by_the_command(folder: Path) -> None:
    _stale(folder / "4711")

    status, text, errors = _watch_command()

    assert (status, text) == (2, "")
    assert "legacy-ddp: error: no job: got no process in" in " ".join(errors.split())
    assert 'a job with checks="off" is not seen' in " ".join(errors.split())
    assert not folder.exists()


def test_the_file_of_a_dead_process_with_the_same_number_is_replaced(folder: Path) -> None:
    _stale(folder / str(os.getpid()))

    with _a_job(_described(_row(0, sample=_sample(seconds=70.0)), _moving(1))):
        assert _watch_command()[0] == 1  # a wait above warn_after_seconds


def test_where_no_socket_can_be_made_there_is_a_reason_and_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A training on a read-only disk stopped in its first call. The socket of another process is left alone."""

    def fail() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    def problem() -> str:
        listener = LocalListener()
        assert listener.socket is None
        return listener.problem

    folder.mkdir(0o700)
    path = str(folder / str(os.getpid()))
    with socket.socket(socket.AF_UNIX) as other, socket.socket(socket.AF_UNIX) as client:
        other.bind(path)
        other.listen()
        assert "is in use: a process with the same number, in another container" in problem()
        client.connect(path)
    monkeypatch.setattr(tempfile, "tempdir", f"/tmp/{'x' * 120}")
    assert re.search(r"too long: got 1\d\d bytes \(.*\), expected at most 107; set TMPDIR", problem())
    monkeypatch.setattr(tempfile, "gettempdir", fail)
    assert "No usable temporary directory found" in problem()


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda path: path.write_text(""), "is no folder: got another kind of file, expected a folder; remove it"),
        (lambda path: path.symlink_to("/tmp"), "is no folder"),
        (
            lambda path: (path.mkdir(), path.chmod(0o755)),
            "is open to other users: got mode 0755, expected 0700; run chmod 700",
        ),
    ],
    ids=["file", "link", "mode"],
)
def test_a_folder_that_cannot_be_trusted_is_used_by_neither_side(
    make: Callable[[Path], object], words: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(folder)
    caplog.set_level(logging.INFO, "legacy_ddp")

    with _a_job({}):
        status, text, errors = _watch_command()

    assert (status, text) == (2, "")
    assert words in " ".join(errors.split())
    (record,) = [record for record in caplog.records if vars(record).get("event") == "local_socket"]
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith(f"legacy-ddp watch does not find this process: {folder} {words}")


_AS_ANOTHER_USER = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect(sys.argv[1])
    try:
        connection.sendall(b'{"request": "process"}\\n')
        print(connection.recv(100))
    except OSError:
        print(b"")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_gets_no_answer_even_through_an_open_folder(folder: Path) -> None:
    with _a_job({}) as requests:
        path = folder / str(os.getpid())
        for opened in (folder.parent, folder, path):
            opened.chmod(0o777)

        done = subprocess.run(
            [sys.executable, "-c", _AS_ANOTHER_USER, str(path)], capture_output=True, text=True, timeout=120
        )

        assert (done.stdout, done.stderr) == ("b''\n", "")
        assert requests == []
        folder.chmod(0o700)
        assert ask(path, {"request": "process"}, 30)["size"] == 2


_STRANGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00\xff\n",
    b"[1, 2]\n",
    b"",
    b"[" * REQUEST_BYTES + b"\n",
    b"x" * 100_000,
    b'{"request": "process", "more": "' + b"x" * REQUEST_BYTES + b'"}\n',
]


@pytest.mark.parametrize("data", _STRANGE, ids=map(str, range(len(_STRANGE))))
def test_strange_bytes_on_the_socket_end_the_connection_and_nothing_else(data: bytes, folder: Path) -> None:
    with _a_job({}) as requests:
        path = folder / str(os.getpid())
        with socket.socket(socket.AF_UNIX) as stranger, suppress(ConnectionError):
            stranger.settimeout(30)
            stranger.connect(str(path))
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(100) == b""

        assert requests == []
        assert ask(path, {"request": "process"}, 30)["size"] == 2


def test_silent_connections_are_closed_and_release_their_descriptors(folder: Path) -> None:
    with _a_job({}):
        path = folder / str(os.getpid())
        before = len(open_files())
        clients = [socket.socket(socket.AF_UNIX) for _ in range(40)]
        for client in clients:
            client.settimeout(30)
            client.connect(str(path))
        for client in clients:
            with suppress(ConnectionError):
                assert client.recv(1) == b""
            client.close()

        assert ask(path, {"request": "process"}, 30)["size"] == 2
        _await(lambda: len(open_files()) == before)  # the last connection is closed behind its answer


def test_a_client_that_goes_away_before_the_answer_changes_nothing(folder: Path) -> None:
    with _a_job(_described(*map(_row, range(300)))) as requests:
        path = folder / str(os.getpid())
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.sendall(b'{"request": "job"}\n')
        _await(lambda: len(requests) == 3)

        assert ask(path, {"request": "process"}, 30)["size"] == 2


def _poll(*changes: dict[int, dict[str, Any]]) -> list[Row]:
    """The rows of ranks that wait in call 5, but for the last rank, which is outside. ``changes`` of their answers."""
    ranks = []
    for rank, changed in enumerate(changes):
        is_last = rank == len(changes) - 1
        status = RankStatus(serial=5 - is_last, call=f"all_reduce() call {5 - is_last}", in_call=not is_last)
        status.activity.enter("agree", status.call)
        ranks.append(Answers(rank, status, changed))
    peers = [one.server.endpoint for one in ranks]
    rows = poll_ranks(peers, peers[0], twice=True)
    for one in ranks:
        one.server.close("")
    return rows


def test_two_polls_tell_who_waits_for_whom_and_not_for_a_rank_that_went_on_between_them() -> None:
    """Asked last, it is in the next call already, and the ranks that were asked first look as if they were behind."""
    job = _described(*_poll({}, {}, {}))
    assert (job["state"], job["missing"], _waiting_ranks(job)) == ("waiting", [2], [0, 1])

    job = _described(*_poll({}, {}, {2: {"serial": 6, "in_call": True, "call": "all_reduce() call 6"}}))
    assert (job["state"], job["missing"], job["summary"]) == ("moving", [], "")


OUTSIDE: dict[str, Any] = {"in_call": False, "sample": _sample("user code")}
_BARRIER, _RECV = Wait("barrier", "train.py:7 in main", 70.0), Wait("recv", "pipe.py:3 in main", 70.0)
_EXCHANGE = [_row(rank, sample=_sample("payload")) for rank in range(2)]
_IDLE = _row(1, **OUTSIDE)


@pytest.mark.parametrize(
    "rows, warn_after_seconds, state, missing",
    [
        ([_row(0, sample=_sample(seconds=70.0)), _moving(1)], 60.0, "late", []),
        (_EXCHANGE, 60.0, "moving", []),
        (_EXCHANGE, 1.0, "late", []),
        ([_IDLE], 60.0, "idle", []),
        ([_IDLE, _row(2, **OUTSIDE, is_busy=True)], 60.0, "moving", []),
        ([_IDLE, _row(2, **OUTSIDE, is_advancing=True)], 60.0, "moving", []),
        ([_row(0, wait=replace(_BARRIER, seconds=0.01), **OUTSIDE), _IDLE], 60.0, "idle", []),
        ([_row(0, wait=replace(_BARRIER, seconds=2.0), **OUTSIDE), _IDLE], 60.0, "waiting", [1]),
        ([_row(0, wait=replace(_BARRIER, seconds=61.0), **OUTSIDE), _IDLE], 60.0, "late", [1]),
    ],
)
def test_the_state_of_a_job_is_a_word(
    rows: list[Row], warn_after_seconds: float, state: str, missing: list[int]
) -> None:
    job = _described(*rows, warn_after_seconds=warn_after_seconds)

    assert (job["state"], job["missing"]) == (state, missing)


@pytest.mark.parametrize(
    "of, told",
    [
        (
            (),
            "; every rank of the wrapper's process group is there; the other 2 ranks of the job may be missing: run "
            "legacy-ddp watch on their hosts",
        ),
        ((4, 5), "; all of them are there; look at the network between them"),
    ],
)
def test_a_group_that_is_a_part_of_the_job_says_that_it_does_not_see_the_rest(of: tuple[int, ...], told: str) -> None:
    """A barrier of the whole job said "all of them are there", with the missing rank outside of the group."""
    rows = [_row(rank, wait=replace(_BARRIER, ranks=of), **OUTSIDE) for rank in range(2)]

    summary = describe_job(rows, [4, 5], 4, 60.0, with_stacks=False)["summary"]

    numbers = "ranks 0-1 of the wrapper's process group are ranks 4-5 of the job"
    assert (
        summary == f"outside of calls: ranks 0-1 have waited 70 s in barrier() at train.py:7 in main{told}; {numbers}"
    )


@pytest.mark.parametrize(
    "waits, told",
    [
        ([_BARRIER, replace(_BARRIER, line="train.py:9 in main")], "all of them are there, at different lines"),
        ([_BARRIER, replace(_BARRIER, function="all_reduce")], "they wait for each other: make the same collectives"),
        (
            [replace(_RECV, source=1), replace(_RECV, source=0)],
            "ranks 0-1 wait for messages that no other sends or takes",
        ),
        (
            [replace(_RECV, source=1), replace(_RECV, source=2), replace(_RECV, source=1), _BARRIER],
            "ranks 1-2 wait for messages that no other sends or takes",
        ),
        (
            [replace(_BARRIER, ranks=(0, 1)), replace(_BARRIER, ranks=(0, 1)), _BARRIER],
            "all of ranks 0-1 are in barrier(): look at the network between them first",
        ),
        (
            [replace(_RECV, source=5), _BARRIER],
            "rank 0 has waited 70 s in recv() for rank 5 of the job, outside of the wrapper's process group, at pipe",
        ),
    ],
)
def test_the_hint_fits_what_the_ranks_wait_in(waits: list[Wait], told: str) -> None:
    """Every two places were "they wait for each other", also the same barrier at two lines."""
    rows = [_row(rank, wait=wait, **OUTSIDE) for rank, wait in enumerate(waits)]
    size = 6 if "rank 5" in told else len(rows)

    assert told in describe_job(rows, range(len(rows)), size, 60.0, with_stacks=False)["summary"]


def test_a_rank_whose_process_goes_on_after_its_end_is_told_with_the_reason_of_the_end() -> None:
    """It was "process exit", at a line of threading, for as long as a thread of the script went on."""
    left = "left after all_reduce() call 4 with ValueError: bad, at train.py:15 in main"
    place = "threading.py:1590 in _shutdown"
    ends = _row(1, in_call=False, serial=4, note=left, sample=_sample("process exit", stack=(place,)))
    waits = _row(0, in_call=False, sample=_sample("user code"), wait=_BARRIER)

    assert _described(waits, ends)["summary"].endswith(f"rank 1 is not there: {left}; its process goes on, at {place}")
    asked = replace(ends, note="left after all_reduce() call 4 with KeyboardInterrupt, at train.py:15 in main")
    assert _described(waits, asked)["summary"] == ""


def test_a_rank_that_stopped_early_and_waits_for_the_others_is_told_with_the_reason() -> None:
    """It waits in the last barrier, and the other ranks in the next call."""
    stopped = _row(1, in_call=False, serial=4, wait=_BARRIER)
    text = " ".join(compose([_row(0), stopped, _row(2)]).text.split())

    assert "missing rank 1 (" in text
    assert "rank 1 waits in barrier() for the ranks in this call, and these for rank 1: make the same calls" in text


@pytest.mark.parametrize("wait", [None, Wait("gather", "train.py:7 in main", 70.0), replace(_BARRIER, seconds=0.01)])
def test_no_order_of_calls_is_advised_where_another_rank_may_be_the_reason(wait: Wait | None) -> None:
    """Rank 0 waited in gather() for a rank that hung, and was told to make its calls in another order."""
    late = _row(1, in_call=False, serial=4, wait=_BARRIER if wait is None else wait)
    hangs = _row(2, in_call=False, serial=4) if wait is None else _row(2)

    assert "make the same calls" not in " ".join(compose([_row(0), late, hangs]).text.split())


@pytest.mark.parametrize(
    "changes, state",
    [
        ({"process": DEAD}, "ended"),
        ({"process": STOPPED, "sample": None, "outcome": Outcome.SILENT}, "stopped"),
        ({"sample": _sample(DEBUGGER), "in_call": False}, "debugger"),
        ({"sample": None, "outcome": Outcome.SILENT, "process": RUNNING}, "silent"),
        ({"sample": None, "outcome": Outcome.UNKNOWN, "is_busy": None}, ""),
        ({"sample": _sample("user code"), "in_call": False, "is_busy": True}, "busy"),
        ({"sample": _sample("user code"), "in_call": False}, "idle"),
        ({"sample": _sample("user code"), "in_call": False, "is_advancing": True}, "moving"),
    ],
)
def test_the_state_of_a_rank_is_a_word(changes: dict[str, Any], state: str) -> None:
    job = _described(_row(0), _row(1, serial=4, **{"last_call": "all_reduce() call 4", **changes}))

    (row,) = [row for row in job["rows"] if row["ranks"] == [1]]
    assert row["state"] == state


def test_a_status_has_the_seconds_between_the_last_two_calls_of_a_wrapper() -> None:
    status = RankStatus()
    assert status.step_seconds() is None

    for call, at in (("1 of wrapper 1 (Net)", 1.0), ("1 of wrapper 2 (Critic)", 2.0), ("2 of wrapper 1 (Net)", 4.5)):
        status.begins.append((f"all_reduce() call {call}", at))
    status.begins.append(("broadcast_buffers() call 1", 5.0))

    assert status.step_seconds() == 3.5


def test_the_table_of_a_report_counted_the_time_of_a_wait_from_the_last_call_on() -> None:
    waits = _row(1, serial=4, wait=replace(_BARRIER, seconds=7.0), in_call=False, sample=_sample("user code", 30.0))

    assert re.search(r"barrier\(\) after all_reduce\(\) call 5 +7\.0 s ", compose([_row(0), waits]).text)


def test_the_waits_of_several_jobs_are_told_below_each_and_their_stacks_after_each_table() -> None:
    waits = _row(0, wait=replace(_BARRIER, seconds=7.0), **OUTSIDE)
    jobs = [(100, [waits, _row(1, **OUTSIDE)]), (200, [_moving(0)])]

    assert _watch.lines([{"pid": pid, **_described(*rows)} for pid, rows in jobs])[1:] == [
        "     100      2      1  all_reduce() call 5               waits for 7.0 s",
        "          outside of calls: rank 0 has waited 7 s in barrier() at train.py:7 in",
        "          main; rank 1 is not there: user code after all_reduce() call 5, at b",
        "     200      1      1  all_reduce() call 5               moving",
        "",
        "legacy-ddp watch PID shows one of them",
    ]
    text = "\n".join(_watch.lines([{"pid": pid, **_described(*rows, with_stacks=True)} for pid, rows in jobs]))
    assert text.count("stack of rank") == text.count("process ") == 2


def test_a_table_of_several_hosts_names_them_and_the_steps() -> None:
    rows = [_row(rank, host=f"node-{rank // 2}", step_seconds=0.1) for rank in range(3)]
    late = _row(3, host="node-1", serial=4, in_call=False, sample=_sample("forward", 3.0), step_seconds=0.2)

    assert _watch.lines([{"pid": 100, **_described(*rows, late)}]) == [
        "4 ranks on node-0, node-1, process 100: waits for 2.0 s",
        "  all_reduce() call 5, phase agree: ranks have waited for 2.0 s; missing rank 3",
        "    (forward after all_reduce() call 5, at b, on host node-1)",
        "",
        "rank  doing                              state    for    step  host",
        "   3  forward after all_reduce() call 5  idle   3.0 s  200 ms  node-1",
        " 0-2  all_reduce() call 5: agree         waits  2.0 s  100 ms  2 hosts",
    ]


_TEXTS = st.text(max_size=60)
_SAMPLES = st.builds(
    Sample,
    call=st.sampled_from(["", "all_reduce() call 5"]),
    phase=st.sampled_from(["agree", "payload", "user code", "forward", "hook", DEBUGGER]),
    age_seconds=st.floats(0, 1e6),
    changes=st.integers(0, 9),
    stack=st.lists(_TEXTS, max_size=3).map(tuple),
    line=_TEXTS,
)
_WAITS = st.builds(
    Wait,
    function=st.sampled_from(["barrier", "all_gather_object", "recv"]),
    line=_TEXTS,
    seconds=st.floats(0, 1e6),
    ranks=st.lists(st.integers(0, 9), max_size=4).map(tuple),
    source=st.integers(-1, 9),
)
_ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "host": _TEXTS,
            "pid": st.integers(0, 2**22),
            "outcome": st.sampled_from(Outcome),
            "sample": st.none() | _SAMPLES,
            "serial": st.integers(0, 9),
            "in_call": st.booleans(),
            "last_call": st.just("") | _TEXTS,
            "process": st.sampled_from(["", RUNNING, STOPPED, DEAD]),
            "note": _TEXTS,
            "is_advancing": st.booleans(),
            "is_busy": st.none() | st.booleans(),
            "payloads": st.just(PayloadState())
            | st.builds(PayloadState, serial=st.integers(1, 9), is_late=st.booleans()),
            "wait": st.none() | _WAITS,
            "step_seconds": st.none() | st.floats(0, 1e6),
            "has_moved": st.booleans(),
        }
    ),
    min_size=1,
    max_size=12,
)


@given(_ROWS, st.floats(0.1, 1e4))
def test_whatever_ranks_say_report_and_table_have_80_columns_and_name_the_missing_or_every_rank(
    facts: list[dict[str, Any]], warn: float
) -> None:
    rows = [Row(rank, **fact) for rank, fact in enumerate(facts)]
    rows = [replace(row, in_call=row.in_call and row.sample is not None) for row in rows]

    report = compose(rows)

    has_escapes = "\\" in report.text  # which make a line longer
    assert has_escapes or all(len(line) <= 80 for line in report.text.splitlines())
    farthest = max([(0, 0), *(row.progress for row in rows if row.in_call)])
    assert {row.rank for row in rows if row.process == DEAD} <= {*report.missing}
    assert all(rows[rank].progress < farthest for rank in report.missing)
    listed = {int(rank) for rank in re.findall(r"(?m)^ *(\d+)  ", report.text)}
    assert set(report.missing[:MAX_ROWS]) <= listed

    job = {"pid": 1, **json.loads(json.dumps(_described(*rows, warn_after_seconds=warn, with_stacks=True)))}

    assert sorted(rank for row in job["rows"] for rank in row["ranks"]) == list(range(len(rows)))
    for lines in (_watch.lines([job]), _watch.lines([job, job])):
        assert all(line.isprintable() for line in lines)
    _, table = "\n".join(_watch.lines([job])).split("\n\n")[:2]
    assert max(map(len, table.splitlines())) <= 80
    assert _watch.exit_status([job]) == (job["state"] == "late")


@given(st.sets(st.integers(0, 2000), min_size=1, max_size=300))
def test_a_list_of_ranks_is_short_and_says_how_many(ranks: set[int]) -> None:
    text = _watch._ranks(sorted(ranks))

    assert len(text) <= 12
    assert "(" not in text or text.endswith(f"({len(ranks)})")


def test_the_command_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None; from legacy_ddp.debug._cli import main; sys.exit(main(sys.argv[1:]))"
    )
    with _a_job(_described(_moving(0), _moving(1))):
        done = subprocess.run(
            [sys.executable, "-c", code, "watch"], cwd=ROOT, capture_output=True, text=True, timeout=120
        )

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].split() == ["0-1", "its", "loop", "goes", "on", "moving", "250", "ms"]


def test_every_shows_the_table_again_until_ctrl_c_which_is_quiet(folder: Path) -> None:
    command = [sys.executable, "-m", "legacy_ddp", "watch", "--every", "0.01"]
    with (
        _a_job(_described(_moving(0), _moving(1)), _described(_row(0), _row(1, serial=4, in_call=False))),
        subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=heed_ctrl_c,
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
    with _a_job(_described(_moving(0), _moving(1))):
        status, text, errors = _watch_command()

    assert (status, text.splitlines()[0]) == (0, f"2 ranks on vm, process {os.getpid()}: moving")
    assert "legacy_ddp-4242 is of another user: got user 0, expected 4242" in errors


def test_a_process_that_is_no_rank_or_of_another_version_or_does_not_answer_is_named(folder: Path) -> None:
    def error(*arguments: int) -> str:
        status, text, errors = _watch_command(*arguments)
        assert (status, text) == (2, "")
        return " ".join(errors.split())

    with _a_job(_described(_moving(0), _moving(1))):
        assert f"process 1 is no rank of a job here: expected a rank, such as {os.getpid()}" in error(1)
    with _a_job({"format": FORMAT + 1, "rows": "something else"}):
        assert f"no rank of the job of process {os.getpid()} answers" in error()
    folder.mkdir(0o700)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / "4711"))
        silent.listen()
        assert "no job answers: process 4711 does not answer" in error()
