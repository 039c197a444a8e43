"""The Unix socket of a process: its folder, strangers, and clients that go away."""

import logging
import os
import re
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from legacy_ddp._watchdog.local import REQUEST_BYTES, LocalListener, ask
from legacy_ddp._watchdog.server import StatusServer
from tests.helpers.processes import open_files
from tests.helpers.watching import a_job, a_row, a_sample, described, moving, wait_for, watch_command

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="needs SO_PEERCRED")


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

    status, text, errors = watch_command()

    assert (status, text) == (2, "")
    assert "legacy-ddp: error: no job: got no process in" in " ".join(errors.split())
    assert 'a job with checks="off" is not seen' in " ".join(errors.split())
    assert not folder.exists()


def test_the_file_of_a_dead_process_with_the_same_number_is_replaced(folder: Path) -> None:
    _stale(folder / str(os.getpid()))

    with a_job(described(a_row(0, sample=a_sample(seconds=70.0)), moving(1))):
        assert watch_command()[0] == 1  # a wait above warn_after_seconds


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

    with a_job({}):
        status, text, errors = watch_command()

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
    with a_job({}) as requests:
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
    with a_job({}) as requests:
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
    with a_job({}):
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
        wait_for(lambda: len(open_files()) == before)  # the last connection is closed behind its answer


def test_a_client_that_goes_away_before_the_answer_changes_nothing(folder: Path) -> None:
    with a_job(described(*map(a_row, range(300)))) as requests:
        path = folder / str(os.getpid())
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.sendall(b'{"request": "job"}\n')
        wait_for(lambda: len(requests) == 3)

        assert ask(path, {"request": "process"}, 30)["size"] == 2
