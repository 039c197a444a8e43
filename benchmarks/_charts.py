"""Drawing of charts as SVG for light or dark pages: bars of ratios with the interval of the median, and growth.

A chart of growth has axes in powers of two and ten, points for runs, and lines for models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, floor, log2, log10
from types import MappingProxyType
from xml.sax.saxutils import escape

from _results import Timed

WIDTH, RIGHT, TOP = 440, 330, 62  # in pixels, as everything below; RIGHT: the end of the longest bar
LETTER = 6.2  # of the small text, about
HEIGHT_OF_LABEL, HEIGHT_OF_BAR, SPACE = 20, 17, 7
LEFT, END, BOTTOM = 56, 416, 300  # of the axes of a chart of growth
LONGEST = 2.5  # a longer bar is cut there: one slow variant would make all others short


@dataclass(frozen=True)
class Bar:
    """``text``: the cell of the table. ``measured``: one row of the results, or several for a range."""

    title: str
    text: str
    measured: Sequence[Timed]


@dataclass(frozen=True)
class Group:
    """The bars of a variant. ``kind``: one of KINDS."""

    label: str
    kind: str
    bars: Sequence[Bar]

    @property
    def height(self) -> int:
        return HEIGHT_OF_LABEL + HEIGHT_OF_BAR * len(self.bars) + SPACE


@dataclass(frozen=True)
class Curve:
    """``values``: milliseconds by number of ranks. ``kind``: one of KINDS. ``style``: one of STYLES."""

    kind: str
    values: Mapping[int, float]
    style: str


@dataclass(frozen=True)
class Mode:
    """Colours of a mode; ``kinds``: of the bars."""

    panel: str
    ink: str
    line: str
    kinds: Sequence[str]


STYLES = MappingProxyType({"points": "", "line": "", "dashes": ' stroke-dasharray="6 4"'})
KINDS = ("legacy_ddp", "torch DDP", "other", "gloo all_gather")
# Okabe and Ito (2008): readers who see no red or no green tell blue and orange apart.
MODES = MappingProxyType(
    {
        "light": Mode("#f6f8fa", "#1f2328", "#57606a", ("#0072b2", "#d55e00", "#8c959f", "#d55e00")),
        "dark": Mode("#21262d", "#e6edf3", "#9198a1", ("#56b4e9", "#e69f00", "#8b949e", "#e69f00")),
    }
)


def draw(heading: str, groups: Sequence[Group], mode: Mode) -> str:
    """The chart: a label for each group, below it a line for each bar."""
    tops = [*accumulate((group.height for group in groups), initial=TOP)]
    scale = _Scale.of(groups)
    used = [kind for kind in KINDS if any(group.kind == kind for group in groups)]
    parts = [*_legend(used, "line: 95 % of the median", mode), *_axis(scale, tops[-1], mode)]
    for top, group in zip(tops, groups, strict=False):
        parts += _group(top, group, scale, mode)
    return _page(heading, tops[-1] + 22, parts, mode)


def draw_growth(heading: str, curves: Sequence[Curve], mode: Mode) -> str:
    """The chart: milliseconds by number of ranks."""
    values = [value for curve in curves for value in curve.values.values()]
    least, most = floor(log10(min(values))), ceil(log10(max(values)))
    last = log2(max(ranks for curve in curves for ranks in curve.values))

    def across(ranks: int) -> float:
        return round(LEFT + (END - LEFT) * (log2(ranks) - 1) / (last - 1), 1)

    def down(value: float) -> float:
        return round(BOTTOM - (BOTTOM - TOP) * (log10(value) - least) / (most - least), 1)

    used = [kind for kind in KINDS if any(curve.kind == kind for curve in curves)]
    parts = _legend(used, "points: runs, lines: models", mode)
    for power in range(least, most + 1):
        height = down(10.0**power)
        parts.append(f'<path d="M{LEFT} {height} H{END}" stroke="{mode.line}" stroke-dasharray="2 3" opacity="0.6"/>')
        parts.append(_text(LEFT - 6, height + 4, f"{10.0**power:g} ms", anchor="end", size=11))
    for power in range(1, int(last) + 1, 2):
        parts.append(_text(across(2**power), BOTTOM + 16, f"{2**power:,}", anchor="middle", size=11))
    parts.append(_text(END, BOTTOM + 32, "ranks", anchor="end", size=11))
    for curve in curves:
        colour = mode.kinds[KINDS.index(curve.kind)]
        places = [(across(ranks), down(value)) for ranks, value in curve.values.items()]
        if curve.style == "points":
            parts += [f'<circle cx="{left}" cy="{top}" r="3.5" fill="{colour}"/>' for left, top in places]
            continue
        line = " L".join(f"{left} {top}" for left, top in places)
        parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="1.5"{STYLES[curve.style]}/>')
    return _page(heading, BOTTOM + 42, parts, mode)


def _page(heading: str, height: int, parts: Sequence[str], mode: Mode) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            f'font-family="sans-serif" font-size="12" fill="{mode.ink}" role="img">',
            f"<title>{escape(heading)}</title>",
            f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{mode.panel}"/>',
            _text(12, 22, heading, bold=True),
            *parts,
            "</svg>\n",
        ]
    )


@dataclass(frozen=True)
class _Scale:
    """From ratios to pixels; ``left``: where bars begin. ``end``: the ratio at the right end."""

    left: int
    end: float

    @staticmethod
    def of(groups: Sequence[Group]) -> "_Scale":
        largest = max(item.interval[1] for group in groups for bar in group.bars for item in bar.measured)
        longest = max(len(bar.title) for group in groups for bar in group.bars)
        return _Scale(30 + round(LETTER * longest), min(LONGEST, ceil(largest * 4) / 4))

    def place(self, ratio: float) -> float:
        return round(self.left + (RIGHT - self.left) * max(0.0, min(ratio, self.end)) / self.end, 1)


def _legend(kinds: Sequence[str], note: str, mode: Mode) -> list[str]:
    parts, left = [], 12
    for kind in kinds:
        colour = mode.kinds[KINDS.index(kind)]
        parts += [f'<rect x="{left}" y="33" width="11" height="11" fill="{colour}"/>', _text(left + 16, 43, kind)]
        left += 96
    return [*parts, _text(WIDTH - 12, 43, note, anchor="end", size=11)]


def _axis(scale: _Scale, bottom: int, mode: Mode) -> list[str]:
    parts = []
    for half in range(int(scale.end * 2) + 1):
        place, style = scale.place(half / 2), 'stroke-width="1.5"' if half == 2 else 'stroke-dasharray="2 3"'
        parts.append(f'<path d="M{place} {TOP - 8} V{bottom}" stroke="{mode.line}" {style} opacity="0.6"/>')
        parts.append(_text(place, bottom + 14, f"{half / 2:g}", anchor="middle", size=11))
    return parts


def _group(top: int, group: Group, scale: _Scale, mode: Mode) -> list[str]:
    colour = mode.kinds[KINDS.index(group.kind)]
    # A panel behind the label: the lines of the axis would cross it.
    parts = [
        f'<rect x="8" y="{top}" width="{WIDTH - 16}" height="{HEIGHT_OF_LABEL - 3}" fill="{mode.panel}"/>',
        _text(12, top + 13, group.label),
    ]
    for number, bar in enumerate(group.bars):
        line = top + HEIGHT_OF_LABEL + HEIGHT_OF_BAR * number
        parts += [_text(22, line + 10, bar.title, size=11), _text(RIGHT + 12, line + 10, bar.text, size=11)]
        height = 12 // len(bar.measured)
        for place, item in enumerate(bar.measured):
            parts += _bar(line + height * place, height, item, scale, colour, mode)
    return parts


def _bar(top: int, height: int, item: Timed, scale: _Scale, colour: str, mode: Mode) -> list[str]:
    end, middle = scale.place(item.ratio), top + height / 2
    low, high = (scale.place(ratio) for ratio in item.interval)
    parts = [f'<rect x="{scale.left}" y="{top}" width="{end - scale.left:.1f}" height="{height - 1}" fill="{colour}"/>']
    if item.ratio > scale.end:  # cut
        tip = f"M{end} {top} l7 {height / 2 - 0.5} l-7 {height / 2 - 0.5} z"
        return [*parts, f'<path d="{tip}" fill="{colour}"/>']
    if high > low:
        parts.append(f'<path d="M{low} {middle - 0.5} H{high}" stroke="{mode.ink}" stroke-width="1.5"/>')
    return parts


def _text(left: float, base: int, text: str, *, bold: bool = False, anchor: str = "start", size: int = 12) -> str:
    style = ' font-weight="bold"' if bold else ""
    return f'<text x="{left}" y="{base}" text-anchor="{anchor}" font-size="{size}"{style}>{escape(text)}</text>'
