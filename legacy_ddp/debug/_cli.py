"""The command ``legacy-ddp``. Data is on stdout, notes and progress on stderr."""

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from legacy_ddp import __version__
from legacy_ddp._errors import TraceError
from legacy_ddp._text import format_bytes, printable, wrap
from legacy_ddp.debug import _watch as watch
from legacy_ddp.debug._diff import result
from legacy_ddp.debug._diff.compare import compare_ranks, compare_runs
from legacy_ddp.debug._diff.result import EXIT_STATUS
from legacy_ddp.debug._errors_page import close_names, find, list_lines, read_sections, section_lines
from legacy_ddp.debug._port import port
from legacy_ddp.debug._port.script import ScriptError
from legacy_ddp.debug._trace import summary
from legacy_ddp.debug._trace.read import Run, open_run
from legacy_ddp.debug._trace.summary import summarise

_NAME = "legacy-ddp"
_UNKNOWN = 2
_INTERRUPTED = 130
_DESCRIPTION = "Compare and read traces of runs, watch jobs, explain errors, and port scripts."
_EPILOG = """exit status: 0 same on every rank, in every step that is in all traces given;
1 different; 2 cannot tell (where the file of one rank ends before the others,
say) or error; show, report and explain: 0 when done.
TRACE is the folder that a Recorder wrote, with one file of every rank."""
_EXPLAIN_EPILOG = """NAME is the class of an error, the title of a section, or a line of an error or
a warning, in quotes; without NAME: all that can be explained. exit status: 0
when done; 2 for an unknown NAME."""
_PORT_EPILOG = """The diff is on stdout, for: legacy-ddp port train.py | patch -p1
For a SCRIPT outside of the present folder: patch -p1 -d /
To keep the script: legacy-ddp port train.py -o train_legacy.py
Remarks are on stderr, with pages of the documentation: a "note" says what a
change means, a "decide" what is left to you. SCRIPT is read, and neither
changed nor run.
exit status: 0 the diff is complete, with notes or without; 2 a "decide" is
left, nothing to port, or error."""
_WATCH_EPILOG = """The command asks one rank of each job of this user on this host, and changes
nothing. The rank polls all ranks of its job, those on other hosts, too. Who
waits for whom is told from two polls that agree.
PID is the process of a rank on this host. A job with checks="off" is not seen.
For a job in a container run the command in the container (docker exec), and
for any job with the TMPDIR of the job.
exit status: 0 the job moves, or waits no longer than its warn_after_seconds;
1 a rank has waited for longer; 2 no job, or error."""
_CLEAR = "\033[H\033[J"  # of a terminal: to the upper left, and remove what is below
# Smaller traces are read in a fraction of a second.
SILENT_BYTES = 20_000_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    _escape_unencodable()
    try:
        given, unknown = _parser().parse_known_args(arguments)
        if unknown:
            given.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
        status: int = given.command(given)
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    except TraceError as error:
        return _fail(f"error: {error}")
    except OSError as error:
        reason = error.strerror or type(error).__name__
        return _fail(f"error: {reason if error.filename is None else f'{error.filename}: {reason}'}")
    except Exception:  # noqa: BLE001 - Python's own status for it would read as "different"
        for line in traceback.format_exc().splitlines():
            _note(line)
        return _fail("error: this is a fault of legacy-ddp's own; please report the lines above")
    return status


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(_NAME, description=_DESCRIPTION, epilog=_EPILOG, formatter_class=raw)
    parser.add_argument("--version", action="version", version=f"{_NAME} {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    diff = commands.add_parser(
        "diff", help="where two runs part, or the ranks of one", epilog=_EPILOG, formatter_class=raw
    )
    diff.add_argument("traces", nargs="+", metavar="TRACE", type=_path, action=_OneOrTwo, help="one, or A and B")
    show = commands.add_parser("show", help="what is in a trace", epilog=_EPILOG, formatter_class=raw)
    show.add_argument("traces", nargs=1, metavar="TRACE", type=_path)
    diff.add_argument(
        "--local-buffers",
        action="append",
        default=[],
        metavar="PATTERN",
        help="buffers that each rank has of its own, such as '*.running_*'; may come again",
    )
    for command in (diff, show):
        command.add_argument("--json", action="store_true", help="an object for machines instead of text")
    report = commands.add_parser("report", help="a page with curves", epilog=_EPILOG, formatter_class=raw)
    report.add_argument("traces", nargs="+", metavar="TRACE", type=_path, action=_OneOrTwo, help="one, or A and B")
    report.add_argument("-o", "--output", type=_path, default=Path("report.html"), help="default: report.html")
    explain = commands.add_parser(
        "explain", help="the meaning of an error or a warning", epilog=_EXPLAIN_EPILOG, formatter_class=raw
    )
    explain.add_argument("name", nargs="*", metavar="NAME", help="for example LayoutError")
    porting = commands.add_parser(
        "port", help="the changes of a script from torch DDP, as a diff", epilog=_PORT_EPILOG, formatter_class=raw
    )
    porting.add_argument(
        "script", metavar="SCRIPT", type=_path, help="a Python file with torch DDP, or with dist.all_reduce over .grad"
    )
    porting.add_argument(
        "-o", "--output", type=_path, metavar="FILE", help="write the changed script to a new FILE, too"
    )
    watching = commands.add_parser(
        "watch", help="what the ranks of a running job do", epilog=_WATCH_EPILOG, formatter_class=raw
    )
    watching.add_argument("pid", nargs="?", metavar="PID", type=int, help="one of several jobs")
    watching.add_argument("--stacks", action="store_true", help="with the Python stacks of the ranks")
    form = watching.add_mutually_exclusive_group()
    form.add_argument("--every", type=_seconds, metavar="SECONDS", help="ask again and again, until Ctrl-C")
    form.add_argument("--json", action="store_true", help="an object for machines instead of text")
    reading = ((diff, _diff), (show, _show), (report, _report), (explain, _explain), (porting, _port))
    for command, run in (*reading, (watching, _watch)):
        command.set_defaults(command=run, parser=command)  # the parser prints the usage if an argument is unknown
    return parser


def _path(given: str) -> Path:
    if not given:  # Path("") is the current folder
        raise argparse.ArgumentTypeError("a path is empty, expected a name; the current folder is .")
    try:
        return Path(given).expanduser()  # a shell does not expand --output=~/page.html
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"no home directory is known for {given!r}; name the whole path") from error


def _seconds(given: str) -> float:
    with suppress(ValueError):
        if 0 < (seconds := float(given)) < float("inf"):
            return seconds
    raise argparse.ArgumentTypeError(f"got {given!r}, expected a number of seconds above 0")


class _OneOrTwo(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, _: str | None = None) -> None:
        if len(values) > 2:
            parser.error(f"got {len(values)} traces, expected one or two")
        setattr(namespace, self.dest, values)


def _diff(given: argparse.Namespace) -> int:
    runs = [open_run(path).with_local_buffers(given.local_buffers) for path in given.traces]
    _tell_size(runs)
    found = compare_runs(*runs) if len(runs) == 2 else compare_ranks(runs[0])
    return _print(result.as_json(found) if given.json else result.lines(found), EXIT_STATUS[found.verdict])


def _show(given: argparse.Namespace) -> int:
    run = open_run(given.traces[0])
    _tell_size([run])
    found = summarise(run)
    return _print(found.as_json() if given.json else summary.lines(found), 0)


def _report(given: argparse.Namespace) -> int:
    runs = [open_run(path) for path in given.traces]
    try:
        from legacy_ddp.debug._page import write_page  # needs bokeh; the other commands do not
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "bokeh":
            raise
        return _fail("error: report needs bokeh, which is not installed; pip install bokeh")
    _tell_size(runs)
    write_page(runs, given.output)
    _note(f"wrote {given.output}")
    return 0


def _explain(given: argparse.Namespace) -> int:
    sections, name = read_sections(), " ".join(given.name)
    if not name:
        return _print(list_lines(sections), 0)
    found = find(name, sections)
    if not found:
        names = close_names(name, sections)
        advice = f"did you mean {' or '.join(names)}? " if names else ""
        return _fail(f"error: {name!r} is not known here: {advice}{_NAME} explain lists all names")
    return _print([line for section in found for line in ["", *section_lines(section)]][1:], 0)


def _port(given: argparse.Namespace) -> int:
    try:
        found = port(given.script)
        if given.output:
            found.write(given.output)
    except ScriptError as error:
        return _fail_in_lines(str(error))
    if sys.stdout and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # the bytes of the script, in every terminal
    if diff := found.diff():
        _write(diff.removesuffix("\n"))  # as it is in the script, for patch
    for line in found.remark_lines():
        _note(line)
    return 0 if found.is_complete else _UNKNOWN


def _watch(given: argparse.Namespace) -> int:
    try:
        if given.every is not None:
            return _watch_again(given)
        answers, notes = watch.look(given.pid, with_stacks=given.stacks)
    except watch.WatchError as error:
        if given.json:
            _print(watch.as_json([]), 0)
        return _fail_in_lines(str(error))
    for note in notes:
        _note(f"{_NAME}: {note}")
    return _print(watch.as_json(answers) if given.json else watch.lines(answers), watch.exit_status(answers))


def _watch_again(given: argparse.Namespace) -> int:
    is_terminal = bool(sys.stdout and sys.stdout.isatty())
    try:
        while True:
            begun = time.monotonic()
            answers, notes = watch.look(given.pid, with_stacks=given.stacks)
            lines = [datetime.now().isoformat(" ", "seconds"), *watch.lines(answers), *notes]
            text = "\n".join(map(printable, lines))
            if not _write(f"{_CLEAR}{text}" if is_terminal else f"{text}\n"):
                return watch.exit_status(answers)
            time.sleep(max(0.0, begun + given.every - time.monotonic()))
    except KeyboardInterrupt:
        return _INTERRUPTED


def _fail_in_lines(text: str) -> int:
    for line in wrap(f"{_NAME}: error: {text}", break_words=False):
        _note(line)
    return _UNKNOWN


def _tell_size(runs: Sequence[Run]) -> None:
    """Tell the size of large traces on a terminal, because reading takes long."""
    size_bytes = sum(run.size_bytes for run in runs)
    if size_bytes >= SILENT_BYTES and sys.stderr and sys.stderr.isatty():
        _note(f"reading {format_bytes(size_bytes)} ...")


def _print(output: "list[str] | dict[str, Any]", status: int) -> int:
    """Write lines, or JSON, to stdout. Returns ``status``."""
    if isinstance(output, list):
        _write("\n".join(map(printable, output)))  # a trace may hold control characters
    else:
        _write(json.dumps(output, indent=1, allow_nan=False))
    return status


def _write(text: str) -> bool:
    """Write to stdout. No failure if a reader such as ``head`` closes it early; returns whether it is open."""
    try:
        print(text)
        if sys.stdout:
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()
        return False
    except OSError:
        _discard_stdout()
        raise
    return True


def _discard_stdout() -> None:
    # The interpreter flushes stdout at exit, and would fail again.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _escape_unencodable() -> None:
    """Escape characters that the encoding of the terminal lacks, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _fail(text: str, status: int = _UNKNOWN) -> int:
    _note(f"{_NAME}: {text}")
    return status


def _note(line: str) -> None:
    if sys.stderr:  # without stderr, print() would use stdout
        with suppress(OSError):  # the exit status matters more than the message
            print(printable(line), file=sys.stderr, flush=True)
