"""Drawings of the documentation: `python docs/drawings.py` writes the files in DRAWINGS.

The drawings have a light panel of their own, so the text is readable on light and on dark pages.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parent
PANEL, LINE, INK, PALE = "#f6f8fa", "#57606a", "#1f2328", "#ffffff"
BLUE, ORANGE, GREEN, RED = "#ddf4ff", "#fff1d6", "#dafbe1", "#ffebe9"
COLOURS = (BLUE, ORANGE, GREEN)


def main() -> None:
    """Write every drawing next to this script."""
    for name, draw in DRAWINGS.items():
        (FOLDER / name).write_text(draw(), encoding="utf-8")


def step() -> str:
    """One call of all_reduce() over two ranks, from the plan to the views. Narrow enough for a small screen."""
    parts = [_text(45, middle, stage, bold=True) for stage, middle in _STAGES.items()]
    for rank, left in enumerate((90, 245)):
        parts += [_text(left + 70, 30, f"rank {rank}", bold=True), *_rank_column(left)]
    parts += [
        _box(90, 187, 295, 46, PALE, ["128 bytes of each rank:", "same call? same layout?"]),
        _arrow(237, 233, 237, 251),
        _box(142, 255, 190, 62, RED, ["ranks differ: every rank", "raises the same error,", "no .grad has changed"]),
        *(_arrow(left, 233, left, 331) for left in (115, 360)),
        _box(90, 335, 295, 34, PALE, ["sum over ranks, then divide"]),
    ]
    return _svg(400, 455, "One step: plan, pack, agree, reduce, alias", parts)


_STAGES = {"plan": 71, "pack": 130, "agree": 215, "reduce": 357, "alias": 411}


def _rank_column(left: int) -> list[str]:
    """The stages that each rank does alone: slots, the flat tensor, and the views of the flat tensor."""
    parts = [_box(left, 44, 140, 46, PALE, ["parameters", "by name: a slot"])]
    for top, caption in ((108, "flat tensor"), (389, ".grad = views")):
        parts.append(_text(left + 70, top + 50, caption))
        for slot, colour in enumerate(COLOURS):
            parts.append(_box(left + 10 + 40 * slot, top, 40, 34, colour, [f"g{slot}"]))
    return [*parts, *(_arrow(left + 70, top, left + 70, top + 14) for top in (90, 165, 371))]


def layers() -> str:
    """The folders of the package in the order of imports."""
    rows: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
        ("tools", (("debug/", "recorder, command"), ("lightning", "strategies"), ("data", "sampler"))),
        ("front", (("_wrapper", "the class, and the function for a plain module"),)),
        ("after a fault", (("_explain/", "which ranks, which parameter, which cause"),)),
        ("operations", (("_call/", "all_reduce, broadcast, join: one line for each stage"),)),
        ("checks", (("_replicas/", "digests"), ("_reproducible", "tree sums"), ("_record", "of a call"))),
        ("ranks", (("_ranks/", "groups, sockets, a call, headers, agreement"),)),
        ("basis", (("_watchdog/", "waits, losses"), ("_memory/", "flat tensors"), ("_steps/", "between calls"))),
        ("shared", (("_errors, _settings, _log, _text, _torch, ...", "modules that all folders use"),)),
    )
    parts = []
    for number, (label, boxes) in enumerate(rows):
        top, width = 20 + 62 * number, 600 // len(boxes)
        parts.append(_text(65, top + 30, label, bold=True))
        for place, (name, holds) in enumerate(boxes):
            colour = COLOURS[number % len(COLOURS)]
            parts.append(_box(130 + width * place, top, width - 10, 50, colour, [name, holds], first_bold=True))
    parts += [_arrow(750, 40, 750, 492), _text(790, 266, "imports")]
    return _svg(840, 532, "The folders of legacy_ddp in the order of imports", parts)


def meeting() -> str:
    """A step of three ranks in the order of time: backward passes alone, the call together, the optimizer alone."""
    parts = [_text(270, 38, "each rank alone", bold=True), _text(555, 38, "together", bold=True)]
    parts.append(_text(720, 38, "each rank alone", bold=True))
    for rank, widths in enumerate(((110, 120), (190, 180), (130, 150))):
        top, left = 60 + 60 * rank, 90
        parts.append(_text(45, top + 25, f"rank {rank}", bold=True))
        for number, width in enumerate(widths):
            parts.append(_box(left, top, width, 40, COLOURS[number], [f"backward {number + 1}"]))
            left += width
        if left < 460:
            parts.append(_box(left, top, 460 - left, 40, PANEL, ["waits"]))
        parts += [_arrow(460, top + 20, 486, top + 20), _arrow(620, top + 20, 646, top + 20)]
        parts.append(_box(650, top, 140, 40, GREEN, ["clip, step()"]))
    parts.append(_box(490, 60, 130, 160, PALE, ["all_reduce()", "compare,", "then add"], first_bold=True))
    return _svg(820, 245, "One meeting in a step of three ranks", parts)


def agreement() -> str:
    """The headers of three ranks, one of them different, and the error on every rank."""
    parts = [_text(190, 38, "own header", bold=True), _text(455, 38, "all headers", bold=True)]
    parts.append(_text(705, 38, "the same finding", bold=True))
    rows = [f"rank {rank}: call 7, layout {layout}" for rank, layout in enumerate(("a41f", "90c2", "a41f"))]
    for rank, row in enumerate(rows):
        top = 60 + 80 * rank
        parts += [
            _text(45, top + 35, f"rank {rank}", bold=True),
            _box(90, top, 200, 60, RED if rank == 1 else BLUE, [row]),
            *(_arrow(290, top + 30, 346, 90 + 80 * other) for other in range(3)),
            _box(350, top, 210, 60, PALE, rows),
            _arrow(560, top + 30, 586, top + 30),
            _box(590, top, 230, 60, RED, ["LayoutError: parameter 'fc.bias':", "rank 1 against ranks 0, 2"]),
        ]
    return _svg(850, 305, "Agreement of three ranks", parts)


def sums() -> str:
    """The parts of three flat tensors, and the rank that adds each part in the order of the ranks."""
    parts = [_text(270, 32, "flat tensors, cut into a part for each rank", bold=True)]
    for rank in range(3):
        parts.append(_text(60, 75 + 50 * rank, f"rank {rank}", bold=True))
        for part, colour in enumerate(COLOURS):
            parts.append(_box(120 + 210 * part, 50 + 50 * rank, 200, 40, colour, [f"part {part} of rank {rank}"]))
    for part, colour in enumerate(COLOURS):
        left = 120 + 210 * part
        parts += [
            _arrow(left + 100, 190, left + 100, 221),
            _box(left, 225, 200, 60, colour, [f"rank {part} adds", "rank 0 + rank 1 + rank 2"], first_bold=True),
            _arrow(left + 100, 285, left + 100, 316),
        ]
    parts.append(
        _box(120, 320, 620, 40, PALE, ["divided, and written to the flat tensor of every rank: the same bits"])
    )
    return _svg(780, 380, "A sum in the order of the ranks", parts)


def hosts() -> str:
    """Two hosts of two ranks: shared memory within a host, gloo between the owners of the same part."""
    parts = []
    for host, (top, first, second) in enumerate(((20, 15, 95), (255, 85, 10))):
        parts += [_box(20, top, 640, 145, PALE, []), _text(70, top + 78, f"host {host}", bold=True)]
        begin, end = (top + 50, top + 91) if host == 0 else (top + 85, top + 54)
        for number in range(2):
            rank, left = 2 * host + number, 130 + 265 * number
            parts.append(_box(left, top + first, 245, 35, BLUE, [f"gradients of rank {rank}"]))
            parts.append(
                _box(left, top + second, 245, 40, COLOURS[number + 1], [f"rank {rank} adds part {number} of both"])
            )
            parts += [_arrow(left + 120, begin, 250 + 265 * other, end) for other in range(2)]
    for number in range(2):
        middle = 252 + 265 * number
        parts += [_arrow(middle, 210, middle, 157), _arrow(middle, 210, middle, 263)]
        parts.append(_box(middle - 75, 190, 150, 40, COLOURS[number + 1], [f"gloo: part {number}"]))
    return _svg(680, 420, "Two hosts of two ranks", parts)


def questions() -> str:
    """Questions from top to bottom, and the tool that answers each."""
    parts = [_text(160, 28, "your question", bold=True), _text(490, 28, "the tool", bold=True)]
    for number, (question, tool) in enumerate(_TOOLS):
        top = 42 + 66 * number
        parts.append(_box(20, top, 280, 46, BLUE, question))
        parts += [_arrow(300, top + 23, 356, top + 23), _text(325, top + 17, "yes")]
        parts.append(_box(360, top, 270, 46, GREEN, tool))
        if number + 1 < len(_TOOLS):
            parts += [_arrow(160, top + 46, 160, top + 63), _text(180, top + 60, "no")]
    return _svg(650, 42 + 66 * len(_TOOLS), "Which tool for which question", parts)


_TOOLS: Sequence[tuple[list[str], list[str]]] = (
    (["Does a message name an error", "or a warning?"], ["legacy-ddp explain NAME"]),
    (["Does the job make no progress?"], ["the report in the log,", "after 60 s by itself"]),
    (["Is the loss NaN or infinite?"], ['Checks(nonfinite="raise")']),
    (["Do ranks hold different weights?"], ["check_replicas(model, optimizer),", 'then checks="detail"']),
    (["Do two runs differ that should", "compute the same?"], ["Recorder in both runs, then", "legacy-ddp diff A B"]),
    (["Is the loss wrong, although all", "ranks agree?"], ["cross_check(model, run, batch)"]),
    (["Does the loss change with the", "number of ranks?"], ["reproducible=True,", "then legacy-ddp diff"]),
    (["Is a step slow?"], ["print(record),", "record.straggler"]),
)


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


def _text(middle: int, base: int, text: str, *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{middle}" y="{base}" text-anchor="middle"{weight}>{escape(text)}</text>'


def _arrow(left: int, top: int, right: int, bottom: int) -> str:
    return f'<path d="M{left} {top} L{right} {bottom}" stroke="{LINE}" stroke-width="1.5" marker-end="url(#tip)"/>'


DRAWINGS: dict[str, Callable[[], str]] = {
    "step.svg": step,
    "layers.svg": layers,
    "concepts/meeting.svg": meeting,
    "concepts/agreement.svg": agreement,
    "concepts/sums.svg": sums,
    "concepts/hosts.svg": hosts,
    "guides/questions.svg": questions,
}


if __name__ == "__main__":
    main()
