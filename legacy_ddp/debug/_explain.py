"""The sections of docs/errors.md as text for a terminal, and the search for one by name."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path

from legacy_ddp._text import WIDTH, wrap

_PAGE = Path(__file__).with_name("errors.md")  # in a checkout a link to docs/errors.md; a package has a copy
_HEADING = re.compile(r"^(##|###) (.*)\n", re.MULTILINE)
_BLOCK = re.compile(r"(?:    .*\n|\n(?=\n*    ))+|(?:\S.*\n)+")  # an example with its blank lines, or a paragraph
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Section:
    """A section of the page. ``group``: the heading above, ``body``: Markdown without the heading."""

    title: str
    group: str
    body: str

    @property
    def names(self) -> list[str]:
        """Its title, and each part of a title such as ``TypeError and ValueError``."""
        return list(dict.fromkeys([self.title, *self.title.split(" and ")]))


def read_sections() -> list[Section]:
    """The sections of the page, in its order.

    Raises:
        OSError: the page cannot be read.
    """
    _, *parts = _HEADING.split(_PAGE.read_text(encoding="utf-8"))
    sections, group = [], ""
    for level, title, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if level == "##":
            group = title
        else:
            sections.append(Section(title, group, body))
    return sections


def find(name: str, sections: list[Section]) -> Section | list[str]:
    """The section of a name, of an anchor (``replicas-differ``) or of the class in a traceback
    (``legacy_ddp.LayoutError:``); without such a section, the closest names, best first."""
    by_key = {_key(known): (known, section) for section in sections for known in section.names}
    wanted = _key(name)
    if wanted in by_key:
        return by_key[wanted][1]
    close = get_close_matches(wanted, by_key, n=3, cutoff=0.5) or [key for key in by_key if wanted and wanted in key]
    return [by_key[key][0] for key in close]


def _key(name: str) -> str:
    name = name.strip().rpartition("#")[2].rstrip(":").removeprefix("legacy_ddp.")
    return "-".join(name.lower().split())


def section_lines(section: Section) -> list[str]:
    """The section in lines of at most 80 columns. Its body has paragraphs and examples, indented by four spaces."""
    lines = [section.title, "=" * len(section.title)]
    for block in _BLOCK.findall(section.body):
        lines += ["", *(_example(block.strip("\n")) if block[0].isspace() else wrap(_plain(block), deeper=""))]
    return lines


def _example(block: str) -> Iterator[str]:
    """Its lines, indented by up to four spaces, so that a line of 80 columns stays one line."""
    lines = [line[4:] for line in block.splitlines()]
    margin = " " * min(4, WIDTH - max((len(line) for line in lines if len(line) <= WIDTH), default=0))
    for line in lines:
        text = line.lstrip()
        indent = margin + " " * (len(line) - len(text))
        yield from [indent + text] if len(indent + text) <= WIDTH else wrap(text, indent)


def _plain(markdown: str) -> str:
    """A paragraph in one line. A link within the page becomes its text, a link to another page also names the page."""
    plain = _LINK.sub(lambda link: f'"{link[1]}" (docs/{link[2]} in the source)' if link[2] else link[1], markdown)
    return " ".join(plain.split())


def list_lines(sections: list[Section]) -> list[str]:
    """The titles of all sections, by group."""
    lines = ["legacy-ddp explain NAME prints its meaning, an example and the next step."]
    for group, members in groupby(sections, key=lambda section: section.group):
        lines += ["", group, *(f"  {member.title}" for member in members)]
    return lines
