"""Writing of the page of ``legacy-ddp report``: a single HTML file which loads nothing. Needs bokeh."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._page.render import PAGE_TAG, render
from legacy_ddp.debug._trace.read import Progress
from legacy_ddp.debug._trace.run import Run

_BEGINNING = f"<!DOCTYPE html>\n<!-- {PAGE_TAG}".encode()


def write_page(runs: Sequence[Run], output: Path, progress: Progress = lambda _: None) -> None:
    """Write a self-contained page about one run or two. An earlier report at ``output`` is replaced.

    Every trace file is read twice, for the comparison and for the charts; ``progress`` gets both.

    Raises:
        TraceError: a trace file cannot be read, ``output`` cannot be written, or ``output`` is no report.
    """
    from legacy_ddp.debug._diff import text
    from legacy_ddp.debug._diff.compare import compare_ranks, compare_runs

    with reserved(output) as part:
        comparison = compare_ranks(runs[0], progress) if len(runs) == 1 else compare_runs(runs[0], runs[1], progress)
        publish(render(runs, comparison, text.lines(comparison), progress), part, output)


@contextmanager
def reserved(output: Path) -> Iterator[Path]:
    """Create a new file beside ``output``, before the long comparison begins. It is removed after the block.

    Raises:
        TraceError: see :func:`write_page`.
    """
    _refuse_other_files(output)
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        part.open("x").close()
    except OSError as error:
        raise TraceError(f"{output} cannot be written: {error.strerror}; name another place with -o") from error
    try:
        yield part
    finally:
        with suppress(OSError):  # renamed by publish()
            part.unlink()


def publish(page: str, part: Path, output: Path) -> None:
    """Write the page to ``part`` and rename ``part`` to ``output``, so that ``output`` is always complete.

    Raises:
        TraceError: the file cannot be written.
    """
    try:
        part.write_text(page, encoding="utf-8", errors="backslashreplace")  # folder names may not be UTF-8
        os.replace(part, output)
    except OSError as error:
        raise TraceError(f"{output} cannot be written: {error.strerror}; name another place with -o") from error


def _refuse_other_files(output: Path) -> None:
    """Refuse to overwrite a file which is no report: -o may name a trace by mistake."""
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
