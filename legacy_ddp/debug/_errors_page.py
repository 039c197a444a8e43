"""Sections of docs/errors.md as text for a terminal, and the search for a section by name or by a line of a text.

The texts of errors and warnings are literals in the source of the library, which is parsed, but not imported. A text
belongs to the error that it is passed to, else to the errors that its function names, else to those of the functions
that call this function or that it calls.
"""

import ast
import builtins
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path

from legacy_ddp._text import WIDTH, wrap

Titles = frozenset[str]
GAP = "\0"  # in place of a value in a text
_PACKAGE = Path(__file__).parents[1]
# Functions that make an error of their arguments.
_MAKERS = {"desync_error": "DesyncError", "import_error": "ImportError"}
# Errors that many functions raise besides their own error.
_COMMON = ("AgreedError", "LegacyDDPError", "LostPeerError", "TypeError", "ValueError", "ImportError", "KeyError")
# Modules that write the texts of errors that other modules raise, by the begin of their paths: the first counts.
_OF_OTHERS = {
    "_explain/missing": ("SyncTimeoutError", "PeerLostError", "Ranks have waited"),
    "_explain/stall": ("Ranks have waited",),
    "_explain/nonfinite": ("NonFiniteGradientError", "Gradients are not finite"),
    "_explain": ("ReplicaDivergenceError", "Replicas differ"),
    "_watchdog": ("SyncTimeoutError", "PeerLostError", "Ranks have waited"),
    "_replicas": ("ReplicaDivergenceError",),
}
_LONGEST_CHAIN = 3  # calls between the function with a text and the function with the error
# Their texts are results of commands, not errors.
_RESULTS = ("debug/_diff", "debug/_page", "debug/_port", "debug/_operations", "debug/_cli.py")


def read_texts(titles: Mapping[str, Titles]) -> Iterator[tuple[str, Titles]]:
    """Each text with the titles of its sections. ``titles``: by the name of an error or a section."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        place = path.relative_to(_PACKAGE).as_posix()
        if not place.startswith(_RESULTS):
            of_others = next((names for begin, names in _OF_OTHERS.items() if place.startswith(begin)), ())
            known = (titles[name] for name in of_others)
            yield from _Module(titles, ast.parse(path.read_text(encoding="utf-8"))).texts(Titles().union(*known))


class _Module:
    def __init__(self, titles: Mapping[str, Titles], module: ast.Module) -> None:
        self._titles = titles
        self._common = Titles().union(*(titles[name] for name in _COMMON))
        self._scopes = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        self._module = module
        assigned = [node for node in module.body if isinstance(node, ast.Assign)]
        self._constants = {_name_of(node.targets[0]): _literal(node.value) for node in assigned}

    def texts(self, default: Titles) -> Iterator[tuple[str, Titles]]:
        """Each text with its sections. ``default``: of texts in a module that names no error."""
        owners = {scope.name: self._named_in(scope) for scope in self._scopes}
        called = {scope.name: {name for name in map(_called_name, ast.walk(scope)) if name} for scope in self._scopes}
        of_module = Titles().union(*owners.values()) - self._common or default
        for _ in range(_LONGEST_CHAIN):
            for name in [name for name, found in owners.items() if not found - self._common]:
                related = (owners[other] for other in owners if name in called[other] or other in called[name])
                owners[name] |= Titles().union(*related) - self._common
        for node in self._module.body:
            name = node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""
            found = owners[name] if name else self._named_in(node)
            yield from self._texts_in(node, found - self._common or of_module or found)

    def _texts_in(self, node: ast.AST, owners: Titles) -> Iterator[tuple[str, Titles]]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # a docstring
            return
        if isinstance(node, ast.FunctionDef):
            found = self._named_in(node)
            owners = found - self._common or owners or found
        elif isinstance(node, ast.Call):
            owners = self._made_by(node) or owners
        if isinstance(node, ast.JoinedStr):
            yield "".join(_literal(part) or GAP for part in node.values), owners
        elif text := _literal(node):
            yield text, owners
        for child in ast.iter_child_nodes(node):
            if not (isinstance(node, ast.JoinedStr) and _literal(child)):
                yield from self._texts_in(child, owners)

    def _named_in(self, scope: ast.AST) -> Titles:
        """The sections of the errors that calls in ``scope`` make, and of a constant ``section``."""
        found = Titles()
        for node in ast.walk(scope):
            if isinstance(node, ast.Call):
                found |= self._made_by(node)
            elif isinstance(node, ast.Assign) and _name_of(node.targets[0]).lower().endswith("section"):
                found |= self._titles.get(_literal(node.value), Titles())
        return found

    def _made_by(self, call: ast.Call) -> Titles:
        """The sections of the errors and warnings whose class or title is the function or an argument of ``call``."""
        if (name := _called_name(call)) in ("isinstance", "issubclass"):
            return Titles()
        names = [_MAKERS.get(name, name), *(_literal(each) or _name_of(each) for each in call.args)]
        names += [self._constants.get(name, "") for name in names]
        return Titles().union(*(self._titles[name] for name in names if name in self._titles))


def _called_name(node: ast.AST) -> str:
    return _name_of(node.func) if isinstance(node, ast.Call) else ""


def _name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _literal(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


_PAGE = Path(__file__).with_name("errors.md")  # in a checkout a link to docs/errors.md; a package has a copy
_HEADING = re.compile(r"^(##|###) (.*)\n", re.MULTILINE)
# An example with blank lines, or a paragraph with the lines of its list.
_BLOCK = re.compile(r"(?:    .*\n|\n(?=\n*    ))+|\S.*\n(?: {0,3}\S.*\n)*")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]*)(?:#[^)]*)?\)")
_Pair = tuple[str, str]  # of neighbouring words
_WORD = re.compile(r"[a-z_]+")
_VALUE = re.compile(rf"'[^']*'|\d[\d.,\-+e]*|{GAP}")
_DEFAULT = re.compile(r"^\s*The default form of \[(\w+)\]")
_KIND = re.compile(r"^.*?(?:Warning|Error): ")  # ``train.py:9: UserWarning:``
_PREFIX = re.compile(r"^.*\blegacy_ddp rank [\d?]+: |^\[rank\d+\]:\s*")  # of a record, and of torch's display
# Lines of the log that are put together from many pieces, by their form.
_FORMS = (
    (re.compile(r"rank \d+ (?:left|ended unexpectedly|closed its status server)\b"), "A rank has ended"),
    (
        re.compile(
            r"outside of calls|.*\b(?:wait outside of calls|ranks have waited)\b|.*\bha(?:s|ve) not come\b|"
            r".*\ball ranks have (?:come|arrived)\b"
        ),
        "Ranks have waited",
    ),
)
_FEWEST_PAIRS = 3
_SHARE = 0.5
_MOST_SECTIONS = 3  # that a text may belong to


@dataclass(frozen=True)
class Section:
    """A section of the page. ``group``: the heading above. ``body``: Markdown without the heading."""

    title: str
    group: str
    body: str

    @property
    def names(self) -> list[str]:
        """The title, and each part of a title such as ``TypeError and ValueError``."""
        return list(dict.fromkeys([self.title, *self.title.split(" and ")]))


def read_sections() -> list[Section]:
    _, *parts = _HEADING.split(_PAGE.read_text(encoding="utf-8"))
    sections, group = [], ""
    for level, title, body in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if level == "##":
            group = title
        else:
            sections.append(Section(title, group, body))
    return sections


def find(name: str, sections: list[Section]) -> list[Section]:
    """The section of a title, of an anchor (``replicas-differ``) or of the class in a traceback
    (``legacy_ddp.LayoutError:``); else the sections of a line of an error or a warning. Empty if nothing is found.
    """
    by_key, before = _by_key(sections), name.partition(": ")[0]
    # A line that begins with an error of Python may be of any library.
    keys = [name, name.rpartition("legacy-ddp explain ")[2], *([] if hasattr(builtins, before) else [before])]
    known = next((by_key[key] for key in map(_key, keys) if key in by_key), None)
    return [known[1]] if known is not None else _find_line(name, sections)


def close_names(name: str, sections: list[Section]) -> list[str]:
    """The names closest to an unknown name, best first."""
    by_key, wanted = _by_key(sections), _key(name)
    close = get_close_matches(wanted, by_key, n=3, cutoff=0.5) or [key for key in by_key if wanted and wanted in key]
    return [by_key[key][0] for key in close]


def _by_key(sections: list[Section]) -> dict[str, tuple[str, Section]]:
    return {_key(known): (known, section) for section in sections for known in section.names}


def _key(name: str) -> str:
    name = name.strip().rpartition("#")[2].rstrip(":").removeprefix("legacy_ddp.")
    return "-".join(name.lower().split())


def _find_line(line: str, sections: list[Section]) -> list[Section]:
    """The sections whose texts have most of the pairs of words in ``line``. A pair of few sections counts more than a
    common pair. Empty if no section has half of the weight, or if the line has too few words.
    """
    line = _PREFIX.sub("", line.strip())
    form = next((title for form, title in _FORMS if form.match(line)), None)
    if form is not None:
        return [section for section in sections if section.title == form]
    wanted = _pairs(_KIND.sub("", line))
    # An error and its warning have the same texts, so they count as one holder of a pair.
    holders: dict[_Pair, set[frozenset[str]]] = {pair: set() for pair in wanted}
    for pairs, titles in _known_texts(tuple(sections)):
        for pair in pairs & wanted:
            holders[pair].add(titles)
    weights = {pair: 1 / max(len(found), 1) for pair, found in holders.items()}
    scores = dict.fromkeys((section.title for section in sections), 0.0)
    for pair, found in holders.items():
        for title in frozenset().union(*found):
            scores[title] += weights[pair]
    candidates = [section for section in sections if "Warning: " not in line or section.group == "Warnings"]
    best = max(scores[section.title] for section in candidates)
    if len(wanted) < _FEWEST_PAIRS or best < _SHARE * sum(weights.values()):
        return []
    equals = [section for section in candidates if scores[section.title] == best]
    # Warnings first: the line of an error has the name of its class, which find() has looked up.
    return sorted(equals, key=lambda section: section.group != "Warnings")[:_MOST_SECTIONS]


@cache
def _known_texts(sections: tuple[Section, ...]) -> list[tuple[frozenset[_Pair], frozenset[str]]]:
    """The pairs of words of each text in the page and in the source, with the titles of its sections."""
    titles = {name: frozenset([section.title]) for section in sections for name in section.names}
    for section in sections:
        if default := _DEFAULT.search(section.body):  # the texts of the error are those of the warning, too
            titles[default[1]] |= titles[section.title]
    of_page = [(block, titles[section.names[-1]]) for section in sections for block in _BLOCK.findall(section.body)]
    return [(_pairs(text), owners) for text, owners in [*of_page, *read_texts(titles)]]


def _pairs(text: str) -> frozenset[_Pair]:
    """The neighbouring words of a text, without numbers, quoted names and values between them."""
    return frozenset(pairwise(_WORD.findall(_VALUE.sub(" ", text.lower()))))


def section_lines(section: Section) -> list[str]:
    """The section in lines of at most 80 columns."""
    lines = [section.title, "=" * len(section.title)]
    for block in _BLOCK.findall(section.body):
        lines += ["", *(_example(block.strip("\n")) if block[0].isspace() else _paragraph(block))]
    return lines


def _paragraph(block: str) -> Iterator[str]:
    """A paragraph, or the items of a list, each from a line of its own on."""
    for item in re.split(r"\n(?=- )", block):
        yield from wrap(_plain(item), deeper="  " if item.startswith("- ") else "")


def _example(block: str) -> Iterator[str]:
    """The lines, indented by at most four spaces: less if a line of 80 columns would not stay one line."""
    lines = [line[4:] for line in block.splitlines()]
    margin = " " * min(4, WIDTH - max((len(line) for line in lines if len(line) <= WIDTH), default=0))
    for line in lines:
        text = line.lstrip()
        indent = margin + " " * (len(line) - len(text))
        yield from [indent + text] if len(indent + text) <= WIDTH else wrap(text, indent)


def _plain(markdown: str) -> str:
    """A paragraph in one line. A link becomes its text; a link to another page also names the page."""
    plain = _LINK.sub(lambda link: f'"{link[1]}" (docs/{link[2]} in the source)' if link[2] else link[1], markdown)
    return " ".join(plain.split())


def list_lines(sections: list[Section]) -> list[str]:
    lines = ["legacy-ddp explain NAME prints its meaning, an example and the next step."]
    for group, members in groupby(sections, key=lambda section: section.group):
        lines += ["", group, *(f"  {member.title}" for member in members)]
    return lines
