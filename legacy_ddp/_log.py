"""Warnings and log records, each with its facts as attributes, and the display of an error at the end of a process.

If all ranks raise the same error, one rank of the job shows the traceback, with a single line of the library in it. A
failed call puts :class:`ShortDisplay` in front of ``sys.excepthook``. It changes only the display: the exception keeps
its traceback. A process with another hook (of the script, of IPython) keeps its hook.
"""

import contextlib
import json
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, partial
from itertools import groupby, islice, takewhile
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._errors import LegacyDDPError, UnsynchronizedStepError
from legacy_ddp._text import error_line, first_line, format_bytes, how_to_explain, printable_lines, shorten

LIBRARY = os.path.join(os.path.dirname(__file__), "")
INNER = (LIBRARY, os.path.join(os.path.dirname(torch.__file__), ""), contextlib.__file__)
_BACKWARD = os.path.join(os.path.dirname(torch.__file__), "autograd", "graph.py")  # its frame calls the engine
_PATHS = sysconfig.get_paths()
_INSTALLED = tuple(os.path.join(_PATHS[kind], "") for kind in ("stdlib", "purelib", "platlib"))
# What starts an installed package: python -m, and the command that pip has made.
_STARTERS = ("<frozen", os.path.join(_PATHS["scripts"], ""))
_MAX_COLUMNS = 200  # compiled code may have any name
_MAX_LINES = 16  # recursion may have thousands
TRACEBACK_VARIABLE = "LEGACY_DDP_TRACEBACK"
_STYLES = ("short", "full")
LOG_VARIABLE = "LEGACY_DDP_LOG"
_FORMS = ("text", "json")
_LEVELS = ("debug", "info", "warning")
# The attributes of every record, None where a record has no value. docs/logging.md describes them.
_FIELDS = ("rank", "event", "call", "phase", "seconds", "bytes", "ranks", "report")
# Attribute of an error that other ranks raise, too: the text to show, and where the traceback is. None on the rank that
# shows the traceback.
_ELSEWHERE = "_legacy_ddp_shown_elsewhere"

LOGGER = logging.getLogger("legacy_ddp")
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def logger_of(rank: int) -> "_RankLogger":
    """The logger of a rank, counted inside its group. ``extra=``: further attributes of a record, of ``_FIELDS``."""
    _configure()  # not at the import, which configures nothing
    return _RankLogger(LOGGER, {"rank": rank})


class _RankLogger(logging.LoggerAdapter[logging.Logger]):
    def log(  # the methods of all levels call it
        self,
        level: int,
        msg: object,
        *args: object,
        exc_info: Any = None,
        extra: Any = None,
        **_: object,
    ) -> None:
        """Make a printable record with all attributes, and give it to the handlers.

        A handler or filter of the script that raises does not end the call of this rank, while other ranks wait.
        ``extra["frame"]``: the place of the record in the code; the caller without one.
        """
        # dictConfig() and fileConfig() disable the loggers that exist, if not told otherwise. No script means this one.
        is_disabled = LOGGER.disabled and level >= max(logging.WARNING, LOGGER.getEffectiveLevel())
        if not (self.isEnabledFor(level) or is_disabled):
            return
        record = None
        try:
            path, line, function, _stack = LOGGER.findCaller(stacklevel=2)
            facts = {**dict.fromkeys(_FIELDS), **(self.extra or {}), **(extra or {})}
            if frame := facts.pop("frame", None):
                path, line, function = frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
            shown = tuple(item if isinstance(item, int | float) else printable_lines(str(item)) for item in args)
            info = sys.exc_info() if exc_info else None
            record = LOGGER.makeRecord(
                LOGGER.name, level, path, line, printable_lines(str(msg)), shown, info, function, facts
            )
            if info:
                # Formatters of logging take this text in place of their own.
                record.exc_text = printable_lines(logging.Formatter().formatException(info))
            if is_disabled:
                _DEFAULT.write(record)
            else:
                LOGGER.handle(record)
        except Exception as error:  # noqa: BLE001 - of the script
            if record is None:  # the record factory of the script has raised
                record = logging.LogRecord(LOGGER.name, level, "", 0, printable_lines(str(msg)), args, None)
                vars(record).update(self.extra or {})
            _show_unlogged(record, error)


def _show_unlogged(record: logging.LogRecord, error: Exception) -> None:
    """Write a record to stderr, and why it is not in the log: ``error``, of a handler, a filter or a record factory."""
    if not logging.raiseExceptions:  # with this setting Python, too, shows no error of a handler
        return
    with contextlib.suppress(Exception):
        why = f"(legacy_ddp: the log of the script raised {error_line(error)})"
        sys.stderr.write(f"{_DEFAULT.format(record)}\n{why}\n")
        sys.stderr.flush()


@cache
def _configure() -> None:
    """Add the default handler, with the form and the level in ``LEGACY_DDP_LOG``."""
    items = _log_items()
    text = "%(asctime)s %(levelname)s %(name)s rank %(rank)s: %(message)s"
    is_json = "json" in items
    _DEFAULT.setFormatter(_JsonFormatter() if is_json else logging.Formatter(text, defaults={"rank": "?"}))
    LOGGER.addHandler(_DEFAULT)
    for level in _LEVELS:
        if level in items and LOGGER.level == logging.NOTSET:  # a level of the script stays
            LOGGER.setLevel(level.upper())


def _log_items() -> list[str]:
    return [item.strip() for item in os.environ.get(LOG_VARIABLE, "").split(",") if item.strip()]


def warn(rank: int, text: str, section: str, *, is_everywhere: bool = False) -> None:
    """Log a warning, with the line of the script that led here, and the command that prints ``section`` of errors.md.

    Not by ``warnings.warn()``: a filter of the script would drop it, or make an error of it. The error would end a
    call, or a step, while the other ranks go on. ``is_everywhere``: every rank has this text. Then rank 0 warns, and
    the other ranks log it at level DEBUG.
    """
    level = logging.DEBUG if is_everywhere and rank != 0 else logging.WARNING
    frame = next((frame for frame in outward(sys._getframe(1)) if not _is_inner(frame)), None)
    line = f"\nat {_line_of(frame)}" if frame is not None else ""
    text = f"{text}{line}\n{how_to_explain(section)}"
    logger_of(rank).log(level, "%s", text, extra={"event": "warning", "frame": frame})


def log_construction(rank: int, describe: Callable[[], str]) -> None:
    logger = logger_of(rank)
    if logger.isEnabledFor(logging.INFO):
        logger.info("new wrapper: %s", describe().replace("\n", "; "), extra={"event": "construction"})


def log_transport(rank: int, transport: str) -> None:
    logger_of(rank).info("transport: %s", transport, extra={"event": "transport"})


def log_call(rank: int, call: str, payload_bytes: int, seconds: Mapping[str, float]) -> None:
    """Log a completed call. The caller has tested for level DEBUG."""
    phases = ", ".join(f"{phase} {1000 * value:.2f} ms" for phase, value in seconds.items())
    facts = {"event": "call", "call": call, "seconds": dict(seconds), "bytes": payload_bytes}
    logger_of(rank).debug("%s: %s; %s", call, format_bytes(payload_bytes), phases, extra=facts)


def log_late_rank(call: str, rank: int, seconds: float, part: str, text: str) -> None:
    """Log the rank for which the others wait; on rank 0."""
    facts = {"event": "late_rank", "call": call, "phase": part or None, "seconds": seconds, "ranks": [rank]}
    logger_of(0).info("%s: %s", call, text, extra=facts)


def is_configured() -> bool:
    """Whether a handler of the script takes the records."""
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        if any(handler is not _DEFAULT for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


class _DefaultHandler(logging.Handler):
    """Writes records to stderr as long as the script has no handler for them."""

    def emit(self, record: logging.LogRecord) -> None:
        if not is_configured():  # otherwise a handler of the script writes the record
            self.write(record)

    def write(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(f"{self.format(record)}\n")  # in one write, so that reports of several ranks do not mix
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - as every handler of Python: a log that cannot be written stops no training
            self.handleError(record)


_DEFAULT = _DefaultHandler()


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            **{name: getattr(record, name, None) for name in _FIELDS},
            "message": record.getMessage(),
            "exception": record.exc_text or (self.formatException(record.exc_info) if record.exc_info else None),
        }
        return json.dumps({name: value for name, value in facts.items() if value is not None}, default=str)


def script_level() -> int:
    """The ``stacklevel`` with which ``warnings.warn()`` in the caller names the last line of the script.

    1, the line of the caller, in a thread without such a line.
    """
    frames = enumerate(outward(sys._getframe(1)), start=1)
    return next((level for level, frame in frames if not _is_inner(frame)), 1)


def script_lines() -> list[str]:
    """``train.py:12 in main``: the lines of the script that lead to the library, the innermost first, 16 at most."""
    frames = (frame for frame in outward(sys._getframe(1)) if not _is_inner(frame))
    return [_line_of(frame) for frame in islice(frames, _MAX_LINES)]


def hook_line() -> str:
    """``train.py:12 in fused_step``: the present line of the hook that the backward pass of this thread called. Empty
    outside of a backward pass."""
    if not internals.inside_backward():
        return ""
    inside = takewhile(lambda frame: frame.f_code.co_filename != _BACKWARD, outward(sys._getframe(1)))
    of_script = [frame for frame in inside if not _is_inner(frame)]
    return _line_of(of_script[-1]) if of_script else ""


def defined_at(function: Callable[..., object]) -> str:
    """``train.py:10 in fused_step``: where a function of the script begins. Empty for any other function."""
    while isinstance(function, partial):
        function = function.func
    function = getattr(function, "__func__", function)  # of a bound method
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is None or code.co_filename.startswith(INNER):
        return ""
    return _place(code, code.co_firstlineno)


def _line_of(frame: FrameType) -> str:
    return _place(frame.f_code, frame.f_lineno)


def _place(code: CodeType, line: int) -> str:
    return shorten(f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}", _MAX_COLUMNS)


def outward(frame: FrameType | None) -> Iterator[FrameType]:
    """``frame`` and its callers, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_inner(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(INNER)


def check_variables() -> None:
    """ValueError for an unknown value of ``LEGACY_DDP_LOG`` or ``LEGACY_DDP_TRACEBACK``."""
    if unknown := [item for item in _log_items() if item not in (*_FORMS, *_LEVELS)]:
        raise ValueError(
            f"environment variable {LOG_VARIABLE}: got {unknown[0]!r}, expected some of {(*_FORMS, *_LEVELS)}, "
            "separated by commas"
        )
    style = os.environ.get(TRACEBACK_VARIABLE)
    if style and style not in _STYLES:
        raise ValueError(f"environment variable {TRACEBACK_VARIABLE}: got {style!r}, expected one of {_STYLES}")


def shorten_display(error: BaseException, *, is_agreed: bool = False, rank: int = 0, first: int = 0) -> None:
    """If no code catches ``error``, show a shorter traceback at the end of the process.

    ``is_agreed``: every rank of the group raises this error. Then rank 0 of the group, which is rank ``first`` of the
    job, shows the traceback. ``rank``: of this process in the group.
    """
    if is_agreed:
        place = f"raised on all ranks; text and traceback are in the output of rank {first}"
        vars(error)[_ELSEWHERE] = (first_line(error).removesuffix(":"), place) if rank else None
    hook = sys.excepthook
    while (inner := internals.inner_excepthook(hook)) is not None:
        hook = inner
    if hook is sys.__excepthook__:
        sys.excepthook = ShortDisplay(sys.excepthook)


def show_elsewhere(error: BaseException, text: str, place: str) -> None:
    """Show a line with ``text`` in place of ``error``. Another rank shows the traceback, at ``place``."""
    vars(error)[_ELSEWHERE] = (text, place)


class ShortDisplay:
    """A ``sys.excepthook`` that shows an error of the library shortened, by the hook before it."""

    def __init__(self, previous: Hook) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.environ.get(TRACEBACK_VARIABLE) not in (None, "", "short"):
            self._previous(kind, error, trace)
        elif (elsewhere := vars(error).get(_ELSEWHERE)) and _next(error) is None:
            line = _line(error, *elsewhere)
            self._previous(type(line), line, None)
        else:
            with _shortened(error):
                self._previous(kind, error, error.__traceback__)


def _line(error: BaseException, text: str, place: str) -> BaseException:
    """An exception that is displayed in one line: type of ``error``, ``text``, this rank's line of the script."""
    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    stand_in: type[BaseException] = type(kind.__name__, (Exception,), names)
    line = line_in_script(error)
    return stand_in(f"{text}{line and f', at {line}'} ({place})")


def line_in_script(error: BaseException) -> str:
    """``train.py:12 in main``: the last line before the library; empty if no other code is in the traceback.

    A line of the script, or of an installed package if the script has none, as with ``python -m``.
    """
    links = takewhile(lambda link: not _file(link).startswith(LIBRARY), _links(error.__traceback__))
    outer = [link for link in links if not _file(link).startswith(INNER)]
    of_script = [link for link in outer if not _file(link).startswith((*_INSTALLED, *_STARTERS))] or outer
    return _place(of_script[-1].tb_frame.f_code, of_script[-1].tb_lineno) if of_script else ""


def _next(error: BaseException) -> BaseException | None:
    """The exception displayed before ``error``: its cause, or the exception under way when ``error`` was raised."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@contextmanager
def _shortened(error: BaseException) -> Iterator[None]:
    """For the block, ``error`` and the exceptions displayed with it have no inner frames."""
    whole: list[tuple[BaseException, TracebackType | None]] = []
    shown: BaseException | None = error
    while shown is not None and all(shown is not other for other, _ in whole):
        whole.append((shown, shown.__traceback__))
        shown = _next(shown)
    try:
        for shown, trace in whole:
            # A wrong argument is the cause of an error of all ranks.
            is_cause = isinstance(error, LegacyDDPError) and isinstance(shown, TypeError | ValueError)
            if is_cause or _hides_frames(shown):
                shown.__traceback__ = _outer_frames(trace)
            if isinstance(shown, UnsynchronizedStepError):
                shown.__traceback__ = _script_frames(trace) or shown.__traceback__
        yield
    finally:
        for shown, trace in whole:
            shown.__traceback__ = trace


def _hides_frames(error: BaseException) -> bool:
    """Whether the reader needs no line of the library: the text says all, or the user pressed Ctrl-C."""
    is_argument = isinstance(error, TypeError | ValueError) and _ELSEWHERE in vars(error)
    return is_argument or isinstance(error, LegacyDDPError | KeyboardInterrupt)


def _outer_frames(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` with a single frame of the library in place of every run of inner frames around the library."""
    outer: list[TracebackType] = []
    for is_inner, run in groupby(_links(trace), lambda link: _file(link).startswith(INNER)):
        frames = list(run)
        of_library = [link for link in frames if _file(link).startswith(LIBRARY)]
        outer += of_library[:1] if is_inner and of_library else frames
    return _linked(outer)


def _script_frames(trace: TracebackType | None) -> TracebackType | None:
    """``trace`` without the frames of installed packages: a step() is found by the line of the script."""
    return _linked([link for link in _links(trace) if not _file(link).startswith((*INNER, *_INSTALLED))])


def _linked(links: Sequence[TracebackType]) -> TracebackType | None:
    trace = None
    for link in reversed(links):
        trace = TracebackType(trace, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return trace


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _file(link: TracebackType) -> str:
    return link.tb_frame.f_code.co_filename
