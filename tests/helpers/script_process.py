"""A forked process as a script: what a new Python sets up before it and does after it, as far as scripts can tell."""

import atexit
import io
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch


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
