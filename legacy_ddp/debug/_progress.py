"""How far has a long read come? Told on stderr, where that is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from legacy_ddp._text import format_bytes

# About what is read in a fraction of a second.
SILENT_BYTES = 20_000_000
_COLUMNS = 80
_EVERY = 1 << 20  # a line is a few kB, and a bar need not move for each


@contextmanager
def reading(size_bytes: int) -> Iterator[Callable[[int], object]]:
    """Gives what takes the bytes that were read. Short reads are silent, and so is stderr that is no terminal."""
    if size_bytes < SILENT_BYTES or not (sys.stderr and sys.stderr.isatty()):
        yield lambda _: None
        return
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]  # it ships no types; not needed, only nicer
    except ModuleNotFoundError:
        print(f"reading {format_bytes(size_bytes)} ...", file=sys.stderr)
        yield lambda _: None
        return
    with tqdm(total=size_bytes, unit="B", unit_scale=True, desc="reading", ncols=_COLUMNS, leave=False) as bar:
        yield _in_pieces(bar.update)


def _in_pieces(update: Callable[[int], object]) -> Callable[[int], object]:
    pending = 0

    def take(size_bytes: int) -> None:
        nonlocal pending
        pending += size_bytes
        if pending >= _EVERY:
            update(pending)
            pending = 0

    return take
