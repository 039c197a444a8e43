"""Comparison of two results files of one benchmark, row by row.

    python benchmarks/diff.py OLD.json NEW.json [--threshold 0.05]

A timed row (with `median_ratio`) is compared by its ratio to the first row of its table, measured in the same
rounds. A row has changed under two conditions: the intervals median +- 1.57 x interquartile range / sqrt(n) do not
touch (the notches of McGill, Tukey and Larsen, Variations of box plots, 1978: about 95 % for the difference of two
medians); and the ratios differ by more than the threshold, as runs differ by more than the rounds of a run.
Medians in ms are shown and not judged: they depend on the machine and its load. The first row has no ratio; if its
median changed by more than the threshold, a note follows, as all ratios depend on the first row. Tables with different
first rows are not judged.

Any other number has changed if it differs by more than the threshold, and by more than 0.01 of its unit. Its noise is
unknown. More is worse, except for speeds and numbers of ranks; numbers without a unit in the name (settings, aims,
`ratios` computed from rows) are shown and not judged. In a timed row such numbers count unless they are times. Changed
texts, such as verdicts, are shown, too.

Exit status: 0 nothing is worse, 1 something is worse, 2 the files cannot be compared.
"""

import argparse
import math
import os
import sys
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _results import Leaf, NotComparable, Place, Results, Timed, is_kind, read, told

BETTER, SAME, CHANGED, WORSE = "better", "", "changed", "worse"
NEGLIGIBLE = 0.01  # MiB, ms, GB/s, a ratio: less of a number without rounds is not worth a word
WIDTH, NAME_WIDTH = 80, 36
# Judged by the last part of a number's place that says what it is: `exchange_ms / 64` are milliseconds.
MORE_IS_BETTER = ("per_second", "share_of_copy", "most_ranks", "most_ranks_with_reading")
MORE_IS_WORSE = ("ms", "us", "seconds", "mib", "megabytes", "bytes", "ratio", "per_step", "per_call", "per_run")


@dataclass(frozen=True)
class Comparison:
    """A row or number of both files, with its judgement."""

    place: Place
    old: Timed | Leaf
    new: Timed | Leaf
    judgement: str


def main(given: Sequence[str] | None = None) -> int:
    """Compare, print; the exit status."""
    arguments = _parse(given)
    try:
        old, new = read(arguments.old), read(arguments.new)
        comparisons = compare(old, new, arguments.threshold)
    except NotComparable as error:
        print(f"cannot compare: {error}", file=sys.stderr)
        return 2
    try:
        _print_environment(old, new)
        _print_rows(old, new, comparisons, arguments.threshold)
        _print_leaves(comparisons)
        _print_one_sided(old, new, arguments)
        _print_sum(comparisons)
        sys.stdout.flush()
    except BrokenPipeError:
        # A reader such as `head` has seen enough. Spare the interpreter another failure when it flushes at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if _count(comparisons, WORSE) else 0


def _parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--threshold", type=float, default=0.05, help="least change to tell (default: %(default)s)")
    arguments = parser.parse_args(given)
    if not 0 <= arguments.threshold < math.inf:
        parser.error(f"--threshold is no share: got {arguments.threshold}, expected 0 or more, such as 0.05")
    return arguments


def compare(old: Results, new: Results, threshold: float) -> list[Comparison]:
    """The rows and numbers of both files, in the order of the new file.

    Raises:
        NotComparable: the files have no row or number in common.
    """
    rows = [place for place in new.rows if place in old.rows]
    leaves = [place for place in new.leaves if place in old.leaves]
    if not rows and not any(isinstance(new.leaves[place], int | float) for place in leaves):
        raise NotComparable("\n".join(["they share no row and no number", *_tables("old", old), *_tables("new", new)]))
    found = []
    for at in rows:
        alike = first_row(old, at) == first_row(new, at)
        judgement = judge_row(old.rows[at], new.rows[at], threshold) if alike else CHANGED
        found.append(Comparison(at, old.rows[at], new.rows[at], judgement))
    for at in leaves:
        judgement = judge_leaf(at, old.leaves[at], new.leaves[at], threshold)
        found.append(Comparison(at, old.leaves[at], new.leaves[at], judgement))
    return found


def _tables(name: str, results: Results) -> list[str]:
    """The titles of the tables of a file, in lines for the screen."""
    return textwrap.wrap(
        f"{name}: {'; '.join(_titles(results))}", WIDTH, subsequent_indent="  ", break_on_hyphens=False
    )


def _titles(results: Results) -> list[str]:
    return list(dict.fromkeys(place[0] for place in (*results.rows, *results.leaves)))


def first_row(results: Results, place: Place) -> Place:
    """The first row of the table of a row: the reference of its ratios."""
    return next(other for other in results.rows if other[:-1] == place[:-1])


def judge_row(old: Timed, new: Timed, threshold: float) -> str:
    """Better or worse if outside of the noise and beyond the threshold."""
    (old_low, old_high), (new_low, new_high) = old.interval, new.interval
    if max(old_low, new_low) <= min(old_high, new_high) or not _differ(old.ratio, new.ratio, threshold):
        return SAME
    return WORSE if new.ratio > old.ratio else BETTER


def judge_leaf(place: Place, old: Leaf, new: Leaf, threshold: float) -> str:
    """Better, worse, or changed for a number without a known direction."""
    if isinstance(old, str) or isinstance(new, str):
        return SAME if old == new else CHANGED
    if not (math.isfinite(old) and math.isfinite(new)):
        return SAME if str(old) == str(new) else CHANGED
    if not _differ(old, new, threshold) or abs(new - old) <= NEGLIGIBLE:
        return SAME
    for part in reversed(place):
        if is_kind(part, MORE_IS_BETTER):
            return BETTER if new > old else WORSE
        if is_kind(part, MORE_IS_WORSE):
            return WORSE if new > old else BETTER
    return CHANGED


def _differ(old: float, new: float, threshold: float) -> bool:
    """Whether the difference exceeds the share ``threshold`` of the smaller number; symmetric."""
    return abs(new - old) > threshold * min(abs(old), abs(new))


def _print_environment(old: Results, new: Results) -> None:
    names = [*old.environment, *(name for name in new.environment if name not in old.environment)]
    for name in names:
        values = [_word(file.environment.get(name, "unknown")) for file in (old, new)]
        if values[0] != values[1]:
            _say(f"{name}: {values[0]} -> {values[1]}")


def _word(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(_word(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _print_rows(old: Results, new: Results, comparisons: Sequence[Comparison], threshold: float) -> None:
    table: Place | None = None
    for found in comparisons:
        if not (isinstance(found.old, Timed) and isinstance(found.new, Timed)):
            continue
        if found.place[:-1] != table:
            table = found.place[:-1]
            _print_head(table, first_row(old, found.place), first_row(new, found.place), old, new, threshold)
        change = f"{100 * (found.new.ratio / found.old.ratio - 1):+.0f}%" if found.old.ratio else ""
        times = f"{_short(found.old.median_ms)}{_short(found.new.median_ms)}"
        figures = f"{times}{found.old.ratio:7.2f}{found.new.ratio:7.2f}{change:>6} {found.judgement}"
        _print_named(found.place[-1] if found.place else "", figures)


def _print_head(table: Place, old_first: Place, new_first: Place, old: Results, new: Results, threshold: float) -> None:
    print()
    _say(told(table))
    if old_first != new_first:
        _say(f"note: ratios are to {old_first[-1]!r} in the old file, {new_first[-1]!r} in the new one: not judged")
    elif _differ(old.rows[old_first].median_ms, new.rows[new_first].median_ms, threshold):
        _say(f"note: the median of {old_first[-1]!r} changed, and all ratios lean on it")
    print(f"{'':{NAME_WIDTH}}{'old ms':>9}{'new ms':>9}{'old':>7}{'new':>7}")


def _short(number: float) -> str:
    return f"{number:9.2f}" if abs(number) < 1e5 else f"{number:9.2g}"


def _print_named(name: str, figures: str) -> None:
    if len(name) > NAME_WIDTH:
        _say(name)
        name = ""
    print(f"{name:{NAME_WIDTH}}{figures}".rstrip())


def _print_leaves(comparisons: Sequence[Comparison]) -> None:
    changed = [found for found in comparisons if not isinstance(found.old, Timed) and found.judgement]
    if changed:
        print("\nother figures and texts that changed")
    for found in changed:
        _say(f"{told(found.place)}: {_word(found.old)} -> {_word(found.new)}, {found.judgement}")


def _print_one_sided(old: Results, new: Results, arguments: argparse.Namespace) -> None:
    for path, own, other in ((arguments.old, old, new), (arguments.new, new, old)):
        alone = [place for place in own.rows if place not in other.rows]
        alone += [place for place in own.leaves if place not in other.leaves and place[:-1] not in alone]
        if alone:
            print()
            _say(f"only in {path}:")
        for table, places in _by_table(alone, own, other).items():
            _say(f"  {told(table)}: {len(places)} entries" if len(places) > 1 else f"  {told(places[0])}")


def _by_table(places: Sequence[Place], own: Results, other: Results) -> dict[Place, list[Place]]:
    """The places by group: a title missing in the other file, otherwise the table."""
    shared_titles = _titles(other)
    tables: dict[Place, list[Place]] = defaultdict(list)
    for place in places:
        table = place[:-2] if place[:-1] in own.rows else place[:-1]  # a number inside a row stands in the row's table
        tables[table if place[0] in shared_titles else place[:1]].append(place)
    return tables


def _print_sum(comparisons: Sequence[Comparison]) -> None:
    counts = {word: _count(comparisons, word) for word in (WORSE, BETTER)}
    print(f"\n{len(comparisons)} compared: {counts[WORSE]} worse, {counts[BETTER]} better")


def _count(comparisons: Sequence[Comparison], judgement: str) -> int:
    return sum(found.judgement == judgement for found in comparisons)


def _say(line: str) -> None:
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    print("\n".join(textwrap.wrap(line, WIDTH, subsequent_indent=indent, drop_whitespace=True)))


if __name__ == "__main__":
    sys.exit(main())
