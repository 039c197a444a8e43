"""A training script as text and tree: positions, names of imports, blocks, values, and edits of the text.

Nothing is imported or run.
"""

import ast
import io
import os
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module
Functions = ast.FunctionDef | ast.AsyncFunctionDef
Block = list[ast.stmt]
Located = ast.expr | ast.stmt | ast.keyword | ast.alias
_CLASSES = ("torch.nn.parallel.DistributedDataParallel", "torch.nn.parallel.distributed.DistributedDataParallel")
# What stands before and after an argument of a call, or a name of an import, on its line.
_BEFORE_ITEM = re.compile(r",[ \t]*\Z|(?<=\()[ \t]*\Z|(?<=\bimport)[ \t]+\Z|\A\s*\Z")
_AFTER_ITEM = re.compile(r"[ \t]*(?:,[ \t]*|(?=[)#\r\n])|\Z)")
_OPTIMIZER_CLASS = re.compile(r"torch\.optim\.\w+|(.*\.)?\w*(Optimizer|Adam\w?|SGD|Muon)")
_MAX_FOLDERS = 4  # around a script, for the modules that it imports
_REST_OF_LINE = re.compile(r"[ \t]*(?:\r\n|\r|\n)")


class ScriptError(Exception):
    """The file cannot be ported. The text says why."""


class UnclearError(Exception):
    """The text around a change does not allow it. ``line``: of the script. ``text``: what the user does instead."""

    def __init__(self, line: int, text: str) -> None:
        super().__init__(text)
        self.line = line


@dataclass(frozen=True)
class Edit:
    """``text`` in place of the characters from ``start`` to ``end``."""

    start: int
    end: int
    text: str


class Script:
    """The tree of a script, its names and values, and edits of its text.

    Raises:
        ScriptError: this version of Python cannot read the text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tree = _parse(text)
        self._lines = io.StringIO(text, newline="").readlines()  # as Python counts: a form feed, say, ends no line
        self._starts = [0, *accumulate(map(len, self._lines))]
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self._places = dict(_places(self.tree))
        self.nodes = sorted(_outside_of_f_strings(self.tree), key=lambda node: (node.lineno, node.col_offset))
        self.hidden = {*self._parents} - {*self.nodes}  # those in f-strings, and neither expressions nor statements
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.functions = [node for node in self.nodes if isinstance(node, Functions)]
        self.imported_from = [
            (node, alias) for node in self.nodes if isinstance(node, ast.ImportFrom) for alias in node.names
        ]
        # If a name has several imports, as in try and except, that of torch's class is the last, and counts.
        self.imports = dict(sorted(self._imported_names(), key=lambda pair: pair[1] in _CLASSES))
        self.values = self._assigned_values()
        self.bound = self._bound_names()

    def start(self, node: Located) -> int:
        return self._position(node.lineno, node.col_offset)

    def end(self, node: Located) -> int:
        return self._position(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def _position(self, line: int, column: int) -> int:
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())  # columns are bytes

    def parent(self, node: ast.AST) -> ast.AST:
        return self._parents[node]

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """The nodes around a node, up to its function and without it."""
        while not isinstance(node := self._parents[node], Scope):
            yield node

    def scope(self, node: ast.AST) -> Scope:
        """The function around a node, or the module."""
        while not isinstance(node := self._parents[node], Scope):
            pass
        return node

    def class_of(self, node: ast.AST) -> ast.AST:
        """The class around a node, or the module."""
        while not isinstance(node, ast.ClassDef | ast.Module):
            node = self._parents[node]
        return node

    def path(self, node: ast.AST) -> list[tuple[Block, int]]:
        """The blocks around a node, from that of its function inwards, each with the index of its statement."""
        return [self._places[at] for at in (node, *self.ancestors(node)) if isinstance(at, ast.stmt)][::-1]

    def dotted(self, node: ast.AST) -> str:
        """The full name of an expression by the imports (``torch.nn.Linear``), or an empty text."""
        if isinstance(node, ast.Attribute):
            before = self.dotted(node.value)
            return f"{before}.{node.attr}" if before else ""
        return self.imports.get(node.id, "") if isinstance(node, ast.Name) else ""

    def has_attribute(self, *names: str) -> bool:
        return any(getattr(node, "attr", "") in names for node in self.nodes)

    def is_ddp(self, node: ast.AST) -> bool:
        return self.dotted(node) in _CLASSES

    def is_optimizer_class(self, node: ast.expr) -> bool:
        return bool(_OPTIMIZER_CLASS.fullmatch(self.dotted(node) or ast.unparse(node)))

    def is_ddp_import(self, node: ast.ImportFrom, alias: ast.alias) -> bool:
        return f"{node.module}.{alias.name}" in _CLASSES

    def is_type(self, node: ast.AST) -> bool:
        """Whether a class stands in an annotation, a comparison, or a test such as ``isinstance()``."""
        parent = self.parent(node)
        if isinstance(parent, ast.Tuple | ast.Subscript | ast.BinOp):
            return self.is_type(parent)
        if isinstance(parent, ast.Call):
            return called_name(parent) in ("isinstance", "issubclass")
        is_annotation = node in (getattr(parent, "annotation", None), getattr(parent, "returns", None))
        return is_annotation or isinstance(parent, ast.Compare)

    @property
    def indentation(self) -> str:
        """That of the first block."""
        found = re.search(r":[ \t]*(?:#.*)?\r?\n(\t| {2,4})\S", self.text)
        return found[1] if found else "    "

    def _imported_names(self) -> Iterator[tuple[str, str]]:
        for node, alias in self.imported_from:
            yield alias.asname or alias.name, f"{'.' * node.level}{node.module or ''}.{alias.name}"
        for alias in (alias for node in self.nodes if isinstance(node, ast.Import) for alias in node.names):
            first = alias.name.partition(".")[0]
            yield (alias.asname, alias.name) if alias.asname else (first, first)

    def calls_of(self, function: ast.AST) -> list[ast.Call]:
        """The calls of a function; none if several functions have its name."""
        name = getattr(function, "name", "")
        is_one = [other.name for other in self.functions].count(name) == 1
        return [call for call in self.calls if is_one and called_name(call) == name]

    def _assigned_values(self) -> dict[str, list[tuple[Scope, ast.expr]]]:
        """The values that the script assigns to each variable or attribute, each with its function."""
        values: dict[str, list[tuple[Scope, ast.expr]]] = defaultdict(list)
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target, value in pairs(node):
                    values[ast.unparse(target)].append((self.scope(node), value))
            elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value:
                values[ast.unparse(node.target)].append((self.scope(node), node.value))
        return values

    def _bound_names(self) -> dict[str, list[tuple[Scope, ast.AST]]]:
        """The assignments, parameters, definitions and imports of each name, each with its function."""
        names: dict[str, list[tuple[Scope, ast.AST]]] = defaultdict(list)
        for node in self._parents:
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                names[node.id].append((self.scope(node), node))
            elif isinstance(node, ast.arg):
                names[node.arg].append((self.scope(node), node))
            elif isinstance(node, ast.alias):
                names[node.asname or node.name].append((self.scope(node), node))
            elif isinstance(node, Functions | ast.ClassDef | ast.ExceptHandler) and node.name:
                names[node.name].append((self.scope(node), node))
        return names

    def replacement(self, node: Located, text: str) -> Edit:
        return Edit(self.start(node), self.end(node), text)

    def new_import(self, line: str) -> Edit:
        """The edit that writes an import behind the first imports."""
        body = self.tree.body
        count = int(ast.get_docstring(self.tree) is not None)
        while count < len(body) and isinstance(body[count], ast.Import | ast.ImportFrom):
            count += 1
        return self.insertion(body[max(count - 1, 0)], [line], is_before=count == 0)

    def insertion(self, statement: ast.stmt, lines: list[str], *, is_before: bool) -> Edit:
        """The edit that writes ``lines`` before or after a statement, with its indentation."""
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        if self._has_code_before(statement) or (not is_before and self._has_code_behind(statement)):
            what = "; ".join(line.strip() for line in lines)
            raise UnclearError(statement.lineno, f"this line has other code, too: write {what} by hand")
        head, newline = self.text[self._starts[first - 1] : self.start(statement)], self._newline(last)
        text = "".join(f"{head}{line}{newline}" for line in lines)
        if not is_before and not self._lines[last - 1].endswith(("\r", "\n")):
            text = newline + text.removesuffix(newline)
        at = self._starts[first - 1 if is_before else last]
        return Edit(at, at, text)

    def _has_code_before(self, statement: ast.stmt) -> bool:
        """Whether other code stands before a statement in its line, or goes on into it."""
        line = statement.lineno
        goes_on = line > 1 and self._lines[line - 2].rstrip("\r\n").endswith("\\")
        return goes_on or bool(self.text[self._starts[line - 1] : self.start(statement)].strip())

    def _has_code_behind(self, statement: ast.stmt) -> bool:
        end = self._starts[statement.end_lineno or statement.lineno]
        return not re.fullmatch(r"(#.*)?", self.text[self.end(statement) : end].strip())

    def statement_removal(self, statement: ast.stmt) -> Edit:
        """The edit that removes a statement with its lines.

        An ``if`` that holds nothing else is removed, too, with the comments in it. If another block would be empty, or
        if the line has other code, ``pass`` replaces the statement.
        """
        around = self.parent(statement)
        block, _ = self._places[statement]
        if isinstance(around, ast.If) and block is around.body and len(block) == 1 and self._is_removable(around):
            return self.statement_removal(around)
        first, last = statement.lineno, statement.end_lineno or statement.lineno
        if len(block) == 1 or self._has_code_before(statement) or self._has_code_behind(statement):
            return self.replacement(statement, "pass")
        return Edit(self._starts[first - 1], self._starts[last], "")

    def _is_removable(self, node: ast.If) -> bool:
        """Whether an ``if`` has no other branch, is no ``elif``, and calls nothing."""
        is_branch = self.text.startswith("elif", self.start(node))
        return not node.orelse and not is_branch and not any(isinstance(at, ast.Call) for at in ast.walk(node.test))

    def block_replacement(self, first: ast.stmt, last: ast.stmt, text: str) -> Edit:
        """The edit that writes a line in place of the statements from ``first`` to ``last`` of one block."""
        if self._has_code_before(first) or self._has_code_behind(last):
            raise UnclearError(first.lineno, f"this line has other code, too: write {text} by hand")
        return Edit(self.start(first), self.end(last), text)

    def item_removal(self, node: Located) -> Edit:
        """The edit that removes an argument of a call or a name of an import, with its comma and an empty line."""
        start, end = self.start(node), self.end(node)
        line = self.text[self._starts[node.lineno - 1] : start]
        before, after = _BEFORE_ITEM.search(line), _AFTER_ITEM.match(self.text, end)
        if not before or not after:
            raise UnclearError(node.lineno, f"remove {' '.join(self.text[start:end].split())} by hand")
        if before[0].startswith(","):
            return Edit(start - len(before[0]), end, "")
        rest = None if line.strip() else _REST_OF_LINE.match(self.text, after.end())
        return Edit(self._starts[node.lineno - 1], rest.end(), "") if rest else Edit(start, after.end(), "")

    def _newline(self, line: int) -> str:  # of the first line, if this is the last one
        for text in (self._lines[line - 1], self._lines[0]):
            if newline := text[len(text.rstrip("\r\n")) :]:
                return newline
        return "\n"


class OtherFiles:
    """The files that a script imports from its folder, or from one of the folders around it."""

    def __init__(self, path: Path) -> None:
        folder = path.absolute().parent
        self._folders = [folder, *folder.parents][:_MAX_FOLDERS]
        self._scripts: dict[Path | None, Script | None] = {None: None}

    def files(self, script: Script) -> list[Path]:
        plain = [alias.name for node in script.nodes if isinstance(node, ast.Import) for alias in node.names]
        found = [file for name in [*plain, *script.imports.values()] for file in self._files(name)]
        return [*dict.fromkeys(found)]

    def files_of_two_levels(self, script: Script, text: str) -> Iterator[tuple[str, Script]]:
        """The files that contain ``text``, among those that a script imports and those that these import.

        Each with its path from the folder of the script.
        """
        near = self.files(script)
        far = [file for path in near if (other := self.read(path)) for file in self.files(other)]
        for path in dict.fromkeys([*near, *far]):
            with suppress(OSError, UnicodeDecodeError):
                if text in path.read_text(encoding="utf-8") and (found := self.read(path)):
                    yield os.path.relpath(path, self._folders[0]), found

    def script(self, module: str) -> Script | None:
        """The script of a module by its full name; None if there is no file, or no script in it."""
        return self.read(next(iter(self._files(module)), None))

    def read(self, file: Path | None) -> Script | None:
        if file not in self._scripts:
            try:
                self._scripts[file] = Script(file.read_text(encoding="utf-8")) if file else None
            except (OSError, UnicodeDecodeError, ScriptError):
                self._scripts[file] = None
        return self._scripts[file]

    def _files(self, name: str) -> Iterator[Path]:
        level, parts = len(name) - len(name.lstrip(".")), name.lstrip(".").split(".")
        for folder in self._folders[level - 1 : level] if level else self._folders:
            for path in (folder.joinpath(*parts[:count]) for count in range(len(parts), 0, -1)):
                yield from filter(Path.is_file, (path.with_name(f"{path.name}.py"), path / "__init__.py"))


def called_name(call: ast.Call) -> str:
    """The last part of the name of the function, or an empty text."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def values_given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(word.value for word in call.keywords)]


def argument(call: ast.Call, name: str, place: int) -> ast.expr | None:
    named = [word.value for word in call.keywords if word.arg == name]
    return named[0] if named else call.args[place] if len(call.args) > place else None


def arguments(function: ast.AST, call: ast.Call) -> dict[str, ast.expr]:
    if not isinstance(function, Functions):
        return {}
    names = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
    is_method = names[:1] in (["self"], ["cls"]) and isinstance(call.func, ast.Attribute)
    found = dict(zip(names[is_method:], call.args, strict=False))
    return found | {word.arg: word.value for word in call.keywords if word.arg}


def nodes_in(statements: Iterable[ast.AST]) -> list[ast.AST]:
    return [node for statement in statements for node in ast.walk(statement)]


def pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The variables of an assignment with their values; a value that is no tuple in the text is that of each one."""
    for target in node.targets:
        variables = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        if len(variables) > 1 and isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(variables):
            yield from zip(variables, node.value.elts, strict=True)
        else:
            yield from ((variable, node.value) for variable in variables)


def is_local(call: ast.Call) -> bool:
    """Whether the call may be of a function of the script: ``name()`` or ``self.name()``."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return isinstance(call.func, ast.Name) or (isinstance(owner, ast.Name) and owner.id in ("self", "cls"))


def _parse(text: str) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the script, such as an unknown escape
            return ast.parse(text)
    except SyntaxError as error:
        raise ScriptError(f"{error.msg} in line {error.lineno}" if error.lineno else str(error.msg)) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise ScriptError(str(error) or "it is nested too deeply") from error


def _places(tree: ast.Module) -> Iterator[tuple[ast.stmt, tuple[Block, int]]]:
    """The block of each statement, and its index there."""
    for node in ast.walk(tree):
        for _, block in ast.iter_fields(node):
            if isinstance(block, list):
                yield from ((item, (block, index)) for index, item in enumerate(block) if isinstance(item, ast.stmt))


def _outside_of_f_strings(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """All expressions and statements; inside of f-strings Python 3.11 has wrong positions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr | ast.stmt):
            yield child
        if not isinstance(child, ast.JoinedStr):
            yield from _outside_of_f_strings(child)
