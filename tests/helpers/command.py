"""The command ``legacy-ddp`` in this process, and the answer of ``legacy-ddp diff --json`` as a record."""

import json
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

_STATUS = {"same": 0, "different": 1, "unknown": 2}


class RefusedError(Exception):
    """The command refused a trace; the text is its line of error."""


def command(
    *arguments: object, output: StringIO | None = None, errors: StringIO | None = None
) -> "CompletedProcess[str]":
    """``python -m legacy_ddp`` with these arguments, without a process of its own.

    ``output``, ``errors``: other files in place of stdout and stderr.
    """
    output, errors = output or StringIO(), errors or StringIO()
    given = [*map(str, arguments)]
    with patch.object(sys, "argv", ["legacy-ddp", *given]), redirect_stdout(output), redirect_stderr(errors):
        try:
            runpy.run_module("legacy_ddp", run_name="__main__")
        except SystemExit as end:
            status = end.code
    return CompletedProcess(given, status, output.getvalue(), errors.getvalue())


def refusal(*arguments: object) -> str:
    """What the command says, in one line, before it ends with 2."""
    done = command(*arguments)
    begin, _, text = done.stderr.partition("legacy-ddp: error: ")
    assert (done.returncode, done.stdout, begin, text.count("\n")) == (2, "", "", 1), done.stderr
    return text.rstrip("\n")


def compare(*folders: Path, local_buffers: tuple[str, ...] = ()) -> Any:
    """What ``legacy-ddp diff --json`` finds between two runs, or between the ranks of one run.

    It has an attribute for each member of the JSON object, and so have the objects inside.

    Raises:
        RefusedError: the command cannot compare the traces.
    """
    patterns = [f"--local-buffers={pattern}" for pattern in local_buffers]
    done = command("diff", "--json", *patterns, *folders)
    if not done.stdout:
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        raise RefusedError(done.stderr.removeprefix("legacy-ddp: error: ").rstrip("\n"))
    found = _record(json.loads(done.stdout))
    assert (done.returncode, done.stderr) == (_STATUS[found.verdict], "")
    return found


def _record(value: Any) -> Any:
    """The value with attributes for the members of objects, and tuples for lists."""
    if isinstance(value, dict):
        return SimpleNamespace(**{name: _record(item) for name, item in value.items()})
    return tuple(map(_record, value)) if isinstance(value, list) else value
