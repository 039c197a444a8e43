"""Drawings of the documentation: `python docs/drawings.py` writes docs/step.svg and docs/rooms.svg.

The drawings have a light panel of their own, so the text is readable on light and on dark pages.
"""

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
PANEL, LINE, INK, PALE = "#f6f8fa", "#57606a", "#1f2328", "#ffffff"
BLUE, ORANGE, GREEN, RED = "#ddf4ff", "#fff1d6", "#dafbe1", "#ffebe9"
COLOURS = (BLUE, ORANGE, GREEN)


def main() -> None:
    """Write every drawing next to this script."""
    for name, drawing in {"step.svg": step(), "rooms.svg": rooms()}.items():
        (FOLDER / name).write_text(drawing, encoding="utf-8")


def step() -> str:
    """One call of all_reduce() over two ranks, from the plan to the views."""
    parts = [_heading(left, name) for left, name in zip((110, 250, 405, 570, 725), _STAGES, strict=True)]
    for rank, top in enumerate((60, 190)):
        parts += [_text(48, top + 45, f"rank {rank}", bold=True), *_rank_row(top)]
    parts += [
        _box(405, 60, 120, 210, PALE, ["128 bytes of", "each rank:", "same call?", "same layout?"]),
        _box(570, 60, 120, 210, PALE, ["sum over ranks,", "then divide"]),
        _arrow(465, 270, 465, 306),
        _box(330, 308, 270, 42, RED, ["ranks differ: the same error on", "every rank, no .grad has changed"]),
    ]
    return _svg(870, 365, "One step: plan, pack, agree, reduce, alias", parts)


_STAGES = ("plan", "pack", "agree", "reduce", "alias")


def _rank_row(top: int) -> list[str]:
    """The stages that each rank does alone: slots, the flat tensor, and the views of the flat tensor."""
    parts = [_box(110, top, 100, 80, PALE, ["parameters", "by name:", "a slot each"])]
    for left, caption in ((250, "flat tensor"), (725, ".grad = views")):
        parts.append(_text(left + 60, top + 72, caption))
        for slot, colour in enumerate(COLOURS):
            parts.append(_box(left + 40 * slot, top + 15, 40, 40, colour, [f"g{slot}"]))
    parts += [_arrow(210, top + 35, 246, top + 35), _arrow(370, top + 35, 401, top + 35)]
    return [*parts, _arrow(525, top + 35, 566, top + 35), _arrow(690, top + 35, 721, top + 35)]


def rooms() -> str:
    """The folders of the package in the order of imports."""
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
        ("tools", (("debug/", "recorder, command"), ("lightning/", "strategies"), ("data", "sampler"))),
        ("front", (("_wrapper", "the class"), ("_unsupported", "other arguments"), ("_describe", "print(model)"))),
        ("operations", (("_collectives/", "all_reduce, broadcast, join: one line for each stage"),)),
        ("checks", (("_agreement/", "headers"), ("_replicas/", "digests"), ("_record", "of a call"))),
        ("transport", (("_transport/", "groups, calls"), ("_reproducible/", "tree sums"))),
        ("basis", (("_buckets/", "flat tensors"), ("_step_guard/", "backward counts"), ("_watchdog/", "lost ranks"))),
        ("shared", (("_errors, _settings, _log, _text, _torch, ...", "modules that all folders use"),)),
    )
    parts = []
    for number, (label, boxes) in enumerate(rows):
        top, width = 20 + 62 * number, 600 // len(boxes)
        parts.append(_text(65, top + 30, label, bold=True))
        for place, (name, holds) in enumerate(boxes):
            colour = COLOURS[number % len(COLOURS)]
            parts.append(_box(130 + width * place, top, width - 10, 50, colour, [name, holds], first_bold=True))
    parts += [_arrow(750, 40, 750, 430), _text(790, 235, "imports")]
    return _svg(840, 470, "The folders of legacy_ddp in the order of imports", parts)


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    tip = '<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    lines = [
        f'{head} font-family="sans-serif" font-size="13" fill="{INK}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<defs>{tip}<path d="M0 0 L8 4 L0 8 z" fill="{LINE}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" rx="8" fill="{PANEL}"/>',
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _box(left: int, top: int, width: int, height: int, fill: str, lines: list[str], *, first_bold: bool = False) -> str:
    first = top + height // 2 - 8 * (len(lines) - 1) + 5
    texts = [
        _text(left + width // 2, first + 16 * number, line, bold=first_bold and number == 0)
        for number, line in enumerate(lines)
    ]
    shape = f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{LINE}"/>'
    return shape + "".join(texts)


def _heading(left: int, name: str) -> str:
    width = 100 if name == "plan" else 120
    return _text(left + width // 2, 38, name, bold=True)


def _text(middle: int, base: int, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{middle}" y="{base}" text-anchor="middle"{weight}>{escape(text)}</text>'


def _arrow(left: int, top: int, right: int, bottom: int) -> str:
    return f'<path d="M{left} {top} L{right} {bottom}" stroke="{LINE}" stroke-width="1.5" marker-end="url(#tip)"/>'


if __name__ == "__main__":
    main()
