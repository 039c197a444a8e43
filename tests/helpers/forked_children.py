"""Python processes that a script starts with ``subprocess``, forked instead of started: torch is loaded once.

Before the script runs, its process forks a template, which stays as it is. For each Python that the script starts, the
template forks a process, which becomes a child of the script's process: it can be waited for and killed as any other.
Needs Linux.
"""

import ctypes
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tests.helpers.script_process import enter, run_and_leave

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_REQUEST = 1 << 20
_LAUNCHER = ("-m", "torch.distributed.run")
# A template shares the process group, and so the signals of a terminal.
_IGNORED_BY_TEMPLATE = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_prctl = ctypes.CDLL(None, use_errno=True).prctl
_ENVIRON = Path("/proc/self/environ")
_SHOWN_FIRST = frozenset(_ENVIRON.read_bytes().split(b"\0") if _ENVIRON.exists() else ())


@dataclass(frozen=True)
class _Start:
    """One process to fork. ``command`` is what ``run_and_leave`` takes."""

    command: tuple[str, ...]
    is_unbuffered: bool
    environment: dict[str, str]
    cwd: str
    start_new_session: bool
    process_group: int


def fork_children() -> None:
    """Fork what this process will start with ``subprocess``. It must have one thread, and load no more before."""
    if sys.platform != "linux":
        return
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    owner = os.getpid()
    if os.fork() == 0:
        try:
            ours.close()
            _serve(theirs, owner)
        finally:
            os._exit(1)
    theirs.close()
    subprocess._fork_exec = _Starter(ours)  # type: ignore[attr-defined]


class _Starter:
    """In place of ``subprocess._fork_exec``; what cannot be forked is started as before."""

    def __init__(self, template: socket.socket) -> None:
        self._template = template
        self._start_as_before = subprocess._fork_exec  # type: ignore[attr-defined]
        self._interpreter = _interpreter_settings(dict(os.environ))
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def __call__(self, *arguments: Any) -> int:
        start = _read(*arguments)
        if start is None or os.getpid() != self._owner or _interpreter_settings(start.environment) != self._interpreter:
            return int(self._start_as_before(*arguments))
        ends = zip((0, 1, 2), (arguments[6], arguments[9], arguments[11]), strict=True)
        return self._fork(start, [own if given == -1 else given for own, given in ends])

    def _fork(self, start: _Start, descriptors: Sequence[int]) -> int:
        """The child's process id, after it is a child of this process."""
        with self._lock:
            # Only for the moment: an orphan of the script's own goes where orphans go.
            _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
            try:
                socket.send_fds(self._template, [pickle.dumps(start)], descriptors)
                # One from the template, 0; one from the child, in either order.
                answers = [self._template.recv(16) for _ in range(2)]
            finally:
                _prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        if not all(answers):
            raise RuntimeError("the template of forked children is gone")
        return max(map(int, answers))


def _read(
    args: Sequence[str | bytes | os.PathLike[str]],
    executables: Sequence[bytes],
    close_fds: bool,
    kept: Sequence[int],
    cwd: str | bytes | None,
    environment: Sequence[bytes] | None,
    *others: Any,
) -> _Start | None:
    """What ``subprocess._fork_exec`` of Python 3.11 and newer is asked for; None if it cannot be forked."""
    *_, start_new_session, process_group, gid, gids, uid, umask, preexec_fn, _ = others
    words = [os.fsdecode(word) for word in args[1:]]
    is_unbuffered = words[:1] == ["-u"]
    command = tuple(words[is_unbuffered:])
    is_script = bool(command) and (command[0] in ("-m", "-c") or not command[0].startswith("-"))
    folder = os.getcwd() if cwd is None else os.fsdecode(cwd)
    if (
        executables[0] != os.fsencode(sys.executable)
        or not is_script
        or not os.path.isdir(folder)
        or len(kept) > 1  # the first is the pipe for errors of exec
        or not close_fds
        or preexec_fn is not None
        or not {gid, gids, uid, umask} <= {None, -1}
    ):
        return None
    variables = dict(os.environ) if environment is None else _decoded(environment)
    return _Start(command, is_unbuffered, variables, folder, start_new_session, process_group)


def _decoded(environment: Sequence[bytes]) -> dict[str, str]:
    pairs = (os.fsdecode(variable).partition("=") for variable in environment)
    return {name: value for name, _, value in pairs}


def _interpreter_settings(environment: dict[str, str]) -> dict[str, str]:
    """Variables that only a new interpreter heeds."""
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


def _serve(requests: socket.socket, owner: int) -> NoReturn:
    """Template: fork until the owner ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != owner:
        os._exit(0)
    for ignored in _IGNORED_BY_TEMPLATE:
        signal.signal(ignored, signal.SIG_IGN)
    gc.freeze()  # a collection in a child would copy all of it
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _LONGEST_REQUEST, 3)
        if not request:
            os._exit(0)
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if os.fork() != 0:
                os._exit(0)  # the child goes to the nearest ancestor that takes orphans: the owner
            _become(pickle.loads(request), requests, descriptors, between)
        os.waitpid(between, 0)
        for descriptor in descriptors:
            os.close(descriptor)
        requests.send(b"0")


def _become(start: _Start, requests: socket.socket, descriptors: Sequence[int], between: int) -> NoReturn:
    """Child: answer when nothing is left to do but the script, as after exec."""
    try:
        while os.getppid() == between:
            time.sleep(0.0001)
        try:
            _enter(start, descriptors)
        finally:
            requests.send(str(os.getpid()).encode())
            requests.close()
        if start.command[:2] == _LAUNCHER:
            fork_children()
        run_and_leave(start.command)
    finally:
        os._exit(1)


def _enter(start: _Start, descriptors: Sequence[int]) -> None:
    for ignored in _IGNORED_BY_TEMPLATE:
        signal.signal(ignored, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if start.start_new_session:
        os.setsid()
    elif start.process_group >= 0:
        os.setpgid(0, start.process_group)
    enter(start.environment, start.cwd, is_unbuffered=start.is_unbuffered)
    _show(start.environment)


def _show(environment: dict[str, str]) -> None:
    """Write what fits of the environment where /proc shows that of the process; nothing refers to the place any more.

    What the server was started with comes last: there is room for hardly more.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = (int(fields[number - 3]) for number in (50, 51))  # as proc(5) counts them
    variables = [os.fsencode(f"{name}={value}") for name, value in environment.items()]
    text = b"".join(variable + b"\0" for variable in sorted(variables, key=_SHOWN_FIRST.__contains__))
    fits = text[: end - begin].rpartition(b"\0")[0] + b"\0"
    ctypes.memset(begin, 0, end - begin)
    ctypes.memmove(begin, fits, len(fits))
