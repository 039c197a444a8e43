"""Progress bar of a long read, on stderr if stderr is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from legacy_ddp._text import format_bytes

# Read in a fraction of a second.
SILENT_BYTES = 20_000_000
_COLUMNS = 80
_UPDATE_BYTES = 1 << 20  # a line has a few kB: too little for an update of the bar


@contextmanager
def progress_bar(size_bytes: int) -> Iterator[Callable[[int], object]]:
    """Yields a function that takes the number of bytes read. Shows nothing for short reads or without a terminal."""
    if size_bytes < SILENT_BYTES or not (sys.stderr and sys.stderr.isatty()):
        yield lambda _: None
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]  # no types shipped; an optional package
    except ModuleNotFoundError:
        print(f"reading {format_bytes(size_bytes)} ...", file=sys.stderr)
        yield lambda _: None
        return
    with tqdm(total=size_bytes, unit="B", unit_scale=True, desc="reading", ncols=_COLUMNS, leave=False) as bar:
        yield _in_batches(bar.update)


def _in_batches(update: Callable[[int], object]) -> Callable[[int], object]:
    pending = 0

    def add(size_bytes: int) -> None:
        nonlocal pending
        pending += size_bytes
        if pending >= _UPDATE_BYTES:
            update(pending)
            pending = 0

    return add
