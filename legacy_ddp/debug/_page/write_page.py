"""How does a report become one HTML page that loads nothing? ``legacy-ddp report``; importing this needs bokeh."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._page.render import MARK, render
from legacy_ddp.debug._trace.read import Progress
from legacy_ddp.debug._trace.run import Run

_BEGINNING = f"<!DOCTYPE html>\n<!-- {MARK}".encode()


def write_page(runs: Sequence[Run], output: Path, progress: Progress = lambda _: None) -> None:
    """One self-contained page about one run, or two. A page of ours at ``output`` is replaced.

    Every file is read twice, to compare and for the charts, and ``progress`` is told both.

    Raises:
        TraceError: a trace cannot be read, ``output`` cannot be written, or is something else than a page of ours.
    """
    from legacy_ddp.debug._diff import text
    from legacy_ddp.debug._diff.compare_ranks import compare_ranks
    from legacy_ddp.debug._diff.compare_runs import compare_runs

    with reserved(output) as part:
        comparison = compare_ranks(runs[0], progress) if len(runs) == 1 else compare_runs(runs[0], runs[1], progress)
        publish(render(runs, comparison, text.lines(comparison), progress), part, output)


@contextmanager
def reserved(output: Path) -> Iterator[Path]:
    """A new file beside ``output``, before minutes are spent on what it will hold; gone after the block.

    Raises:
        TraceError: see :func:`write_page`.
    """
    _refuse_what_is_not_ours(output)
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        part.open("x").close()
    except OSError as error:
        raise TraceError(f"{output} cannot be written: {error.strerror}; name another place with -o") from error
    try:
        yield part
    finally:
        with suppress(OSError):  # published, it has another name
            part.unlink()


def publish(page: str, part: Path, output: Path) -> None:
    """Make ``part`` the page, and then ``output`` of it: nobody sees half a page.

    Raises:
        TraceError: it cannot be written.
    """
    try:
        part.write_text(page, encoding="utf-8", errors="backslashreplace")  # it names folders
        os.replace(part, output)
    except OSError as error:
        raise TraceError(f"{output} cannot be written: {error.strerror}; name another place with -o") from error


def _refuse_what_is_not_ours(output: Path) -> None:
    """-o may name a trace, or somebody's notes, by mistake."""
    try:
        if not output.exists():
            return
        if not output.is_file():
            raise TraceError(f"{output} is no file, expected a place for a page; name another one with -o")
        with open(output, "rb") as file:
            beginning = file.read(len(_BEGINNING))
    except OSError as error:
        raise TraceError(f"{output} cannot be read: {error.strerror}; name another place with -o") from error
    if beginning not in (b"", _BEGINNING):
        raise TraceError(f"{output} exists and is no report; name another place with -o, or remove it")
