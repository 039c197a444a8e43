"""Who is waited for, and what does everybody do? What the ranks said -> a text of 80 columns. Pure."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from legacy_ddp._compare import name_ranks
from legacy_ddp._text import encodable
from legacy_ddp._watchdog.activity import DEBUGGER, HOOK, STANDING_IN, Sample
from legacy_ddp._watchdog.client import Outcome
from legacy_ddp._watchdog.processes import DEAD, RUNNING, STOPPED, TRACED

LEFT_FOR_A_LOSS = "left because another rank was lost"
MAX_ROWS = 24
MAX_STACKS = 8
MAX_PARTS = 4
# Where in one call a rank stands; the later, the farther. A rank that has left the call is the farthest.
_PHASES = ("plan", "pack", "digest", "agree", "compare", HOOK, "payload", "alias")


@dataclass(frozen=True)
class Row:
    """What is known of one rank: ``sample`` is None if it did not answer. ``serial``: calls that it began on the group.

    ``process``: what the kernel of its machine says, if anybody there could look. ``note``: its goodbye, or its error.
    """

    rank: int
    host: str
    pid: int
    outcome: Outcome
    sample: Sample | None = None
    serial: int = 0
    in_call: bool = False
    last_call: str = ""
    process: str = ""
    note: str = ""
    is_advancing: bool = False
    is_busy: bool | None = None  # None: not looked at twice

    @property
    def progress(self) -> tuple[int, int]:
        """Comparable between ranks: how far this one is. Behind everybody if nothing is known, or if it has ended."""
        if self.sample is None or self.has_ended:
            return (-1, 0)
        if not self.in_call:
            return (self.serial, len(_PHASES))
        return (self.serial, _PHASES.index(self.sample.phase) if self.sample.phase in _PHASES else 0)

    @property
    def is_known(self) -> bool:
        """Whether anything at all speaks for what it says here."""
        was_asked = self.outcome not in (Outcome.NOT_ASKED, Outcome.DEAF)
        return was_asked or bool(self.note) or self.process not in ("", RUNNING)

    @property
    def has_ended(self) -> bool:
        """Whether its process is dead, whatever it said before."""
        return self.outcome is Outcome.GONE or self.process == DEAD

    @property
    def left_for_a_loss(self) -> bool:
        """Whether it ended because another rank was lost first."""
        return self.note.startswith(LEFT_FOR_A_LOSS)

    @property
    def is_held(self) -> bool:
        """Whether somebody stopped it on purpose and may let it go on."""
        return self.sample is not None and self.sample.phase == DEBUGGER

    @property
    def stands_in(self) -> bool:
        """Whether it has run out of data, and waits inside torch's Join for what the others do."""
        return self.sample is not None and self.sample.phase == STANDING_IN and not self.has_ended

    @property
    def doing(self) -> str:
        """What it does, in words."""
        if self.has_ended:
            return str(Outcome.GONE)
        if self.sample is None:
            return str(self.outcome)
        if self.in_call:
            return f"{self.last_call}: {self.sample.phase}"
        if self.sample.call:
            return f"{self.sample.call} of another group: {self.sample.phase}"
        return f"{self.sample.phase} after {self.last_call}" if self.last_call else self.sample.phase

    @property
    def condition(self) -> str:
        """Its process in one word, as well as it is known."""
        if self.has_ended:
            return DEAD
        process = self.process or ("answers" if self.outcome is Outcome.ANSWERED else "unknown")
        return process if self.is_busy is None else f"{process}, {'busy' if self.is_busy else 'idle'}"


@dataclass(frozen=True)
class Report:
    """One text for every rank, its first lines in one (``head``), and the ranks that it names.

    ``summary``: who is missing and what they do; equal in two reports if nothing has changed. ``is_harmless``: they are
    alive and get on. ``is_busy``: they get on or compute, which may be a loop. ``speakers``: one waiting rank per
    machine, to print it there.
    ``is_late``: nothing broke, the time was up.
    """

    head: str
    text: str
    summary: str
    awaited: tuple[int, ...]
    is_harmless: bool
    is_busy: bool
    speakers: tuple[int, ...]
    is_late: bool = False


def decode_report(said: Mapping[str, Any]) -> Report:
    """A report that travelled as JSON."""
    return Report(**{**said, "awaited": tuple(said["awaited"]), "speakers": tuple(said["speakers"])})


def say_loss(row: Row, reason: str, who: str = "") -> str:
    """What was lost and where the rank of ``row`` is, short: all that its user sees if a launcher ends it now.

    ``who``: the ranks that may be lost, if ``reason`` names none.
    """
    place = f"{row.last_call}, phase {row.sample.phase}" if row.in_call and row.sample else row.doing
    line = (row.sample.line or row.sample.stack[-1]) if row.sample and row.sample.stack else ""
    parts = [reason, *([who] if who else []), f"{name_ranks([row.rank])} is in {place}{line and f', at {line}'}"]
    return "\n".join(_wrap("; ".join(parts), width=120))


def awaited(rows: Sequence[Row]) -> tuple[int, ...]:
    """The ranks that are not as far as the farthest that is in a call; nobody, if all wait at the same place."""
    farthest = max([(0, 0), *(row.progress for row in rows if row.in_call)])
    behind = [row for row in rows if row.progress < farthest and not row.stands_in]
    known = tuple(row.rank for row in behind if row.is_known and not row.left_for_a_loss)
    unknown = tuple(row.rank for row in behind if not row.is_known)
    # Of those below, each is named only if it can be nobody above: who is not known, then who left after another.
    if known or len(unknown) == 1:
        return known or unknown
    return () if unknown else tuple(row.rank for row in behind)


def compose(
    rows: Sequence[Row],
    reason: str = "",
    *,
    is_late: bool = False,
    lost: Sequence[int] = (),
    is_inquiry: bool = True,
) -> Report:
    """The report on the farthest call. ``reason``: what went wrong; else some rank only waits longer than expected.

    ``lost``: ranks known to be. ``is_inquiry``: all were asked; else what is known of others may be that they heard of
    the loss first, and left.
    """
    missing = _missing(rows, lost, is_inquiry=is_inquiry)
    waiting = [row for row in rows if row.sample is not None and row.in_call and row.rank not in missing]
    waited_seconds = max((row.sample.age_seconds for row in waiting if row.sample), default=0.0)
    summary = _summary(rows, missing)
    head = f"{_where(rows)}: {reason or f'ranks have waited for {waited_seconds:.1f} s'}; {summary}"
    lines = [*_wrap(head), "", *_table(rows, missing), *_stacks(rows, missing)]
    gets_on = [_gets_on(rows[rank], waited_seconds) for rank in missing]
    return Report(
        head=encodable(head),  # hosts and paths may have any name
        text=encodable("\n".join(lines)),
        summary=encodable(summary),
        awaited=missing,
        is_harmless=bool(missing) and all(gets_on),
        is_busy=bool(missing) and all(on or rows[rank].is_busy for rank, on in zip(missing, gets_on, strict=True)),
        speakers=tuple({row.host: row.rank for row in reversed(waiting)}.values()),
        is_late=is_late,
    )


def _missing(rows: Sequence[Row], lost: Sequence[int], *, is_inquiry: bool) -> tuple[int, ...]:
    if not lost:
        return awaited(rows)
    # Beside the lost one those that do not answer either; who answers is late at most, and so may be who is silent but
    # seen to run: on a crowded machine an answer takes longer than anybody waits for it.
    behind = [rows[rank] for rank in awaited(rows) if not rows[rank].left_for_a_loss] if is_inquiry else []
    silent = [row.rank for row in behind if row.has_ended or (row.sample is None and row.process != RUNNING)]
    return tuple(sorted({*lost, *silent}))


def _gets_on(row: Row, waited_seconds: float) -> bool:
    """Whether it was seen to move, or has entered what it does while the others waited, or is held on purpose."""
    entered = row.sample is not None and 2 * row.sample.age_seconds < waited_seconds
    return row.is_advancing or entered or row.is_held


def _at(sample: Sample | None) -> str:
    """The user's own line, and where that leads if it is into a library."""
    if sample is None or not sample.stack:
        return ""
    innermost = sample.stack[-1]
    if sample.line in ("", innermost):
        return f", at {innermost}"
    return f", at {sample.line}, inside {innermost}"


def _where(rows: Sequence[Row]) -> str:
    """The farthest place that a rank is known to be at."""
    row = max(rows, key=lambda row: (row.in_call, row.progress))
    return f"{row.last_call}, phase {row.sample.phase}" if row.in_call and row.sample else row.last_call


def _summary(rows: Sequence[Row], missing: Sequence[int]) -> str:
    """Who is waited for and why, in half a sentence."""
    if not missing and (unknown := [row.rank for row in rows if not row.is_known]):
        return f"who is missing is not known: nobody asked {name_ranks(unknown)}"
    if not missing and all(row.sample is not None and row.sample.phase == HOOK for row in rows):
        return "no rank is missing, every rank is in its communication hook; look at what it waits for"
    if not missing:
        where = "every rank is in this call" if all(row.in_call for row in rows) else "no rank is behind this call"
        return f"no rank is missing, {where}; look at the network between them"
    why: dict[str, list[int]] = {}
    for rank in missing:
        why.setdefault(_why(rows[rank]), []).append(rank)
    parts = [f"{name_ranks(ranks)} ({what}{_hosts(rows, ranks)})" for what, ranks in list(why.items())[:MAX_PARTS]]
    if len(why) > MAX_PARTS:
        parts.append(f"... {len(why) - MAX_PARTS} other kinds")
    return "missing " + "; ".join(parts)


def _hosts(rows: Sequence[Row], ranks: Sequence[int]) -> str:
    hosts = list(dict.fromkeys(rows[rank].host for rank in ranks if rows[rank].pid))
    if not hosts:
        return ""
    more = f", ... {len(hosts) - MAX_PARTS} more" if len(hosts) > MAX_PARTS else ""
    return f", on host{'s' if len(hosts) > 1 else ''} {', '.join(hosts[:MAX_PARTS])}{more}"


def _why(row: Row) -> str:
    what = row.note or f"{row.doing}{_at(row.sample)}"
    if row.process in (STOPPED, TRACED):
        what = f"its process is {row.process}"
    elif row.outcome is Outcome.SILENT and row.process == RUNNING:
        what = "its process is running but does not answer: Python may be held up by C code"
    return what


def _table(rows: Sequence[Row], missing: Sequence[int]) -> list[str]:
    """Those waited for first; ranks of one kind share a line when there are too many to list."""
    shown = sorted(rows, key=lambda row: (row.rank not in missing, row.rank))
    lines = [f"{'rank':>5}  {'doing':38}{'for':>8}  process on host:pid"]
    for row in shown[:MAX_ROWS]:
        age = f"{row.sample.age_seconds:.1f} s" if row.sample else "?"
        lines += _wrap(f"{row.rank:5}  {row.doing:38}{age:>8}  {row.condition} on {row.host}:{row.pid}", indent=9)
    rest: dict[str, list[int]] = {}
    for row in shown[MAX_ROWS:]:
        rest.setdefault(row.doing, []).append(row.rank)
    for doing, ranks in rest.items():
        lines += _wrap(f"... {name_ranks(ranks)}: {doing}")
    return lines


def _stacks(rows: Sequence[Row], missing: Sequence[int]) -> list[str]:
    """The Python stacks of those that answered, equal ones together, the rarest first: it is the one to read."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for row in rows:
        if row.sample is not None and row.sample.stack:
            groups.setdefault(row.sample.stack, []).append(row.rank)
    lines = []
    ordered = sorted(groups.items(), key=lambda item: (len(item[1]), item[1][0] not in missing, item[1]))
    for stack, ranks in ordered[:MAX_STACKS]:
        lines += ["", *_wrap(f"stack of {name_ranks(ranks)}, innermost last:"), *(f"  {frame}" for frame in stack)]
    if len(ordered) > MAX_STACKS:
        left = sorted(rank for _, ranks in ordered[MAX_STACKS:] for rank in ranks)
        lines += ["", *_wrap(f"... other stacks of {name_ranks(left)}")]
    return lines


def _wrap(text: str, indent: int = 2, width: int = 80) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False)
