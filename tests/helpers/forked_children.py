"""Python processes that a script starts with ``subprocess``, forked instead of started: torch is loaded once.

Before the script runs, its process forks a template, which stays as it is. For each Python that the script starts, the
template forks a process, which becomes a child of the script's process: it can be waited for and killed as any other.
Needs Linux.
"""

import atexit
import ctypes
import gc
import io
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

# A forked process as a script: what a new Python sets up before it and does after it, as far as scripts can tell


def enter(environment: Mapping[str, str], cwd: str, *, is_unbuffered: bool = False) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    _open_streams(is_unbuffered or bool(environment.get("PYTHONUNBUFFERED")))
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
    torch.seed()  # a new Python does not start with the numbers of the last
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_streams(is_unbuffered: bool) -> None:
    """Those of the server were opened for other files, and its input is closed."""
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    sys.stdout = _writer(1, is_unbuffered, os.isatty(1), "strict")
    sys.stderr = _writer(2, is_unbuffered, True, "backslashreplace")


def _writer(number: int, is_unbuffered: bool, ends_with_lines: bool, errors: str) -> io.TextIOWrapper:
    raw = io.FileIO(number, "w", closefd=False)
    if is_unbuffered:
        return io.TextIOWrapper(raw, errors=errors, write_through=True)
    return io.TextIOWrapper(io.BufferedWriter(raw), errors=errors, line_buffering=ends_with_lines)


def run_and_leave(command: Sequence[str]) -> NoReturn:
    """Run ``FILE ...``, ``-m MODULE ...`` or ``-c CODE ...``, and end the process as the interpreter would."""
    status = 1
    try:
        status = _run(command)
        sys.stdout.flush()
        sys.stderr.flush()
        if status == -signal.SIGINT:  # so that who waits for it can tell
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(status)


def _run(command: Sequence[str]) -> int:
    left: dict[str, Any] = {}  # the objects of the script outlive the exit functions
    try:
        left = _run_as_main(command)
        status = 0
    except SystemExit as end:
        status = _status(end.code)
    except BaseException as error:  # noqa: BLE001 - shown as the interpreter shows it
        sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
        sys.excepthook(*sys.exc_info())
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    left.clear()
    return status


def _status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _run_as_main(command: Sequence[str]) -> dict[str, Any]:
    """The variables of the script. Not runpy: torchrun looks for the modules of its callers, frozen ones at length."""
    first, *others = command
    main = sys.modules["__main__"] = ModuleType("__main__")
    if first == "-m":
        sys.path.insert(0, os.getcwd())
        _, main.__spec__, code = runpy._get_module_details(others[0])  # type: ignore[attr-defined]
        main.__package__, main.__file__ = main.__spec__.parent, main.__spec__.origin
        sys.argv = [str(main.__file__), *others[1:]]
    elif first == "-c":
        sys.path.insert(0, "")
        code = compile(others[0], "<string>", "exec")
        sys.argv = ["-c", *others[1:]]
    else:
        sys.path.insert(0, str(Path(first).absolute().parent))
        main.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec")
        sys.argv = list(command)
    exec(code, vars(main))
    return vars(main)


_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LONGEST_REQUEST = 1 << 20
_LAUNCHER = ("-m", "torch.distributed.run")
# A template shares the process group, and so the signals of a terminal.
_IGNORED_BY_TEMPLATE = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_prctl = ctypes.CDLL(None, use_errno=True).prctl


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
    variables = dict(os.environ)
    if environment is not None:
        variables = dict(os.fsdecode(variable).split("=", 1) for variable in environment)
    return _Start(command, is_unbuffered, variables, folder, start_new_session, process_group)


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
