"""The Unix socket of a process, through which ``legacy-ddp watch`` finds the process and asks it.

The socket is a file in a folder of the user, as that of tmux. The mode of the folder keeps other users out, and the
kernel names the user at the other end of a connection: no secret is on the disk. A socket that refuses a connection was
left by a process that was killed.

The command starts without torch, so this module imports the standard library alone.
"""

import json
import os
import re
import socket
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

FORMAT = 1  # of the answers: the command may be that of another version of the library
REQUEST_BYTES = 256  # of a request, at most
_ANSWER_BYTES = 2**24  # of an answer, at most: a thousand ranks with as many stacks need less
_PATH_BYTES = 107  # of the path of a Unix socket, at most: Linux has 108 with the zero at the end
_PART_BYTES = 2**16
_FOLDER = re.compile(r"legacy_ddp-(\d+)")
_TRIES = 3  # before the last: another process may remove the folder, empty, after this process has made it
_ROOT = 0


def folder_of(user: int) -> Path:
    """The folder of the sockets of all processes of a user, by the number of the user."""
    return Path(tempfile.gettempdir(), f"legacy_ddp-{user}")


def folders() -> list[tuple[Path, int]]:
    """The folders to look into, each with its user: the own folder; for root the folders of all users."""
    user = os.geteuid()
    if user != _ROOT:
        return [(folder_of(user), user)]
    names = sorted(path.name for path in Path(tempfile.gettempdir()).glob("legacy_ddp-*"))
    return [(folder_of(int(match[1])), int(match[1])) for match in map(_FOLDER.fullmatch, names) if match]


def problem_of(folder: Path, user: int) -> str:
    """Why the folder cannot be trusted; empty if it can be, or if there is none."""
    try:
        status = folder.lstat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{folder} cannot be read: {error.strerror}"
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is no folder: got another kind of file, expected a folder; remove it"
    if status.st_uid != user:
        return f"{folder} is of another user: got user {status.st_uid}, expected {user}; set TMPDIR to another folder"
    if stat.S_IMODE(status.st_mode) & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        return f"{folder} is open to other users: got mode {mode:04o}, expected 0700; run chmod 700 {folder}"
    return ""


class LocalListener:
    """The listening socket of this process, for all its watchdogs. ``problem``: why there is none; else empty."""

    def __init__(self) -> None:
        self.socket: socket.socket | None = None
        self.problem = ""
        self._uses = 0
        self._path = Path(os.devnull)  # until the folder is known: there may be no folder for temporary files
        try:
            self._path = folder_of(os.geteuid()) / str(os.getpid())
            self._open()
        except OSError as error:
            self.problem = str(error) if error.errno is None else f"{self._path}: {error.strerror}"

    def is_of_user(self, connection: socket.socket) -> bool:
        """Whether the process at the other end is of the user of this process, or of root."""
        size = struct.calcsize("3i")
        try:
            _, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        except OSError:
            return False
        return user in (os.geteuid(), _ROOT)

    def use(self) -> None:
        self._uses += 1

    def release(self) -> bool:
        """Remove the socket after its last use; return whether this was the last."""
        self._uses -= 1
        if self._uses:
            return False
        if self.socket is not None:
            # The file first: a socket that refuses a connection is that of a killed process.
            with suppress(OSError):
                self._path.unlink()
            self.socket.close()
            with suppress(OSError):  # of other processes
                self._path.parent.rmdir()
        return True

    def forget(self) -> None:
        """In a forked child: close the copy. The file is the parent's."""
        if self.socket is not None:
            self.socket.close()

    def _open(self) -> None:
        if not hasattr(socket, "SO_PEERCRED"):
            raise OSError("this system does not tell which user is at the other end of a Unix socket")
        length = len(os.fsencode(self._path))
        if length > _PATH_BYTES:
            raise OSError(
                f"the path of its socket is too long: got {length} bytes ({self._path}), expected at most "
                f"{_PATH_BYTES}; set TMPDIR to a shorter path"
            )
        for _ in range(_TRIES):
            with suppress(FileNotFoundError):
                self.socket = self._listen()
                return
        self.socket = self._listen()

    def _listen(self) -> socket.socket:
        folder = self._path.parent
        with suppress(FileExistsError):
            folder.mkdir(0o700)
        if problem := problem_of(folder, os.geteuid()):
            raise OSError(problem)
        if os.path.lexists(self._path):
            self._remove_stale()
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(str(self._path))
            listener.listen(64)
            listener.setblocking(False)
        except OSError:
            listener.close()
            raise
        return listener

    def _remove_stale(self) -> None:
        """Remove the socket of a killed process that had the number of this one."""
        if is_alive(self._path):
            raise OSError(
                f"{self._path} is in use: a process with the same number, in another container, listens there; "
                "give each container a TMPDIR of its own"
            )
        self._path.unlink()


_listeners: list[LocalListener] = []  # of this process: one at most
_lock = threading.Lock()


def share_listener(on_problem: Callable[[str], None]) -> LocalListener:
    """The listener of this process, made at its first use. ``on_problem``: is told once why it has no socket."""
    with _lock:
        is_new = not _listeners
        if is_new:
            _listeners.append(LocalListener())
        (listener,) = _listeners
        listener.use()
    if is_new and listener.problem:
        on_problem(listener.problem)
    return listener


def release_listener(listener: LocalListener) -> None:
    """End a use of the listener. The last one removes the socket."""
    with _lock:
        if listener in _listeners and listener.release():
            _listeners.remove(listener)


def forget_listener() -> None:
    """In a forked child: close the copy of the parent's socket."""
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it
    for listener in _listeners:
        listener.forget()
    _listeners.clear()


# The side of the command


def sockets(folder: Path) -> Iterator[tuple[int, Path]]:
    """The number of each process with a socket in ``folder``, and the path of the socket."""
    with suppress(FileNotFoundError):
        yield from sorted((int(path.name), path) for path in folder.iterdir() if path.name.isdecimal())


def is_alive(path: Path) -> bool:
    """Whether a process listens at the socket. A socket is also called alive where this cannot be told."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            connection.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:
            return True
    return True


def ask(path: Path, request: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """The answer of the process that listens at ``path``.

    Raises:
        ConnectionRefusedError: the process has ended.
        OSError: no answer in time, or none of this format.
    """
    deadline = time.monotonic() + seconds
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        connection.connect(str(path))
        connection.sendall(json.dumps(request).encode() + b"\n")
        line = _read_line(connection, deadline)
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict) or answer.get("format") != FORMAT:
        raise OSError(f"the answer is no object of JSON with format {FORMAT}")
    return answer


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    """A line; empty if the connection ends before."""
    data = bytearray()
    while len(data) < _ANSWER_BYTES:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(_PART_BYTES)
        data += part
        if data.endswith(b"\n"):
            return bytes(data)
        if not part:
            break
    return b""
