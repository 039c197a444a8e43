"""The texts of errors and warnings, read from the source of the library, each with its sections of docs/errors.md.

Nothing is imported or run: a text is a literal in the source. It belongs to the error that it is passed to, else to the
errors that its function names, else to those of the functions that call this function, or that it calls.
"""

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

Titles = frozenset[str]
GAP = "\0"  # in place of a value in a text
_PACKAGE = Path(__file__).parents[1]
# Functions that make an error of their arguments.
_MAKERS = {"desync_error": "DesyncError", "import_error": "ImportError"}
# Errors that many functions raise besides the error that they are about.
_COMMON = ("AgreedError", "LegacyDDPError", "LostPeerError", "TypeError", "ValueError", "ImportError", "KeyError")
# Folders of modules that only write texts, for errors that other modules raise.
_OF_FOLDERS = {
    "_watchdog": ("SyncTimeoutError", "PeerLostError", "Ranks have waited"),
    "_replicas": ("ReplicaDivergenceError",),
}
_LONGEST_CHAIN = 3  # of functions that call each other, up to the error
_RESULTS = ("debug/_diff", "debug/_page", "debug/_port", "debug/_operations", "debug/_cli.py")  # of commands


def read_texts(titles: Mapping[str, Titles]) -> Iterator[tuple[str, Titles]]:
    """Each text with the titles of its sections. ``titles``: by the name of an error or a section."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        place = path.relative_to(_PACKAGE).as_posix()
        if not place.startswith(_RESULTS):
            known = (titles[name] for name in _OF_FOLDERS.get(place.partition("/")[0], ()))
            yield from _Module(titles, ast.parse(path.read_text(encoding="utf-8"))).texts(Titles().union(*known))


class _Module:
    """The texts of a module."""

    def __init__(self, titles: Mapping[str, Titles], module: ast.Module) -> None:
        self._titles = titles
        self._common = Titles().union(*(titles[name] for name in _COMMON))
        self._scopes = [node for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
        self._module = module
        assigned = [node for node in module.body if isinstance(node, ast.Assign)]
        self._constants = {_name_of(node.targets[0]): _literal(node.value) for node in assigned}

    def texts(self, default: Titles) -> Iterator[tuple[str, Titles]]:
        """Each text with its sections. ``default``: of a text that nothing in the module claims."""
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
        """The sections of the errors that ``call`` makes, or of which a warning tells: its function, or an argument, is
        their class or their title."""
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
