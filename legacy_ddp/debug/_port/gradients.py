"""Gradients in a script: the variables that hold them, and the calls that reduce them, or seem to."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from legacy_ddp.debug._port.script import Functions, Script, called_name, pairs, values_given

# Calls that change the shape of gradients, but no value.
SHAPE = {"_flatten_dense_tensors", "_unflatten_dense_tensors", "append", "cat", "clone", "contiguous", "detach"}
SHAPE |= {"extend", "flatten", "list", "narrow", "ravel", "reshape", "reshape_as", "split", "squeeze", "stack"}
SHAPE |= {"tuple", "unsqueeze", "view", "view_as", "zip"}
_COPIES = {"_flatten_dense_tensors", "cat", "clone", "contiguous", "flatten", "ravel", "reshape", "stack"}
# Methods that change their variable, or put something into it.
WRITERS = ("append", "extend", "copy_", "div_", "mul_")
_REDUCING = re.compile(r"torch\.distributed\.(all_reduce|reduce_scatter|reduce)(_\w+)?")
# Functions of other files that seem to average gradients.
_BY_NAME = re.compile(r"(?i)(?!.*(no_sync|clip))(?=.*grad)(?=.*(av(era)?g|mean|reduce|sync)).*|(all_?)?reduce_param.*")


@dataclass(frozen=True)
class Gradients:
    """``calls``: those that return the gradients that they get. ``writers``: methods that put them into a variable."""

    names: frozenset[str] = frozenset()
    calls: frozenset[str] = frozenset(SHAPE | {"div", "new", "new_empty", "new_zeros", "zero_"})
    writers: tuple[str, ...] = ("append", "extend", "copy_")

    def of(self, scope: ast.AST) -> "Gradients":
        """The same with the variables of a function."""
        nodes, found, before = [*own_nodes(scope)], self, None
        while found != before:
            before = found
            for node in nodes:
                found = replace(found, names=found.names.union(found._made_by(node)))
        return found

    def _made_by(self, node: ast.AST) -> set[str]:
        if isinstance(node, ast.Assign):
            return {at.id for at, value in pairs(node) if isinstance(at, ast.Name) and self.carries(value)}
        if isinstance(node, ast.For):
            return self._of_loop(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in self.writers:
            is_written = any(map(self.carries, node.args)) and not has_grad(node.func.value)
            return {root(node.func.value)} - {""} if is_written else set()
        return set()

    def _of_loop(self, loop: ast.For | ast.comprehension) -> set[str]:
        return {target.id for target, value in items(loop) if isinstance(target, ast.Name) and self.carries(value)}

    def carries(self, node: ast.AST | None) -> bool:
        """Whether the value of an expression consists of gradients."""
        if isinstance(node, ast.Name):
            return node.id in self.names
        if isinstance(node, ast.Attribute):
            return node.attr == "grad" or (node.attr == "data" and self.carries(node.value))
        if isinstance(node, ast.Subscript | ast.Starred):
            return self.carries(node.value)
        if isinstance(node, ast.List | ast.Tuple):
            return any(map(self.carries, node.elts))
        if isinstance(node, ast.ListComp | ast.GeneratorExp):
            return replace(self, names=self.names.union(*map(self._of_loop, node.generators))).carries(node.elt)
        if isinstance(node, ast.BinOp):
            is_scaled = isinstance(node.op, ast.Div | ast.Mult) and "div" in self.calls
            return is_scaled and (self.carries(node.left) or self.carries(node.right))
        if isinstance(node, ast.Call) and called_name(node) in self.calls:
            return any(map(self.carries, [getattr(node.func, "value", None), *node.args]))
        return False


# The variables that are gradients themselves, not copies.
ALIASES = Gradients(calls=frozenset(SHAPE - _COPIES), writers=("append", "extend"))


def items(loop: ast.For | ast.comprehension) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The variables of a loop, each with the expression that it iterates over."""
    target, value = loop.target, loop.iter
    if isinstance(value, ast.Call) and called_name(value) == "enumerate" and isinstance(target, ast.Tuple):
        target, value = target.elts[-1], value.args[0]
    if isinstance(value, ast.Call) and called_name(value) == "zip" and isinstance(target, ast.Tuple):
        yield from zip(target.elts, value.args, strict=False)
    elif isinstance(value, ast.Call) and called_name(value) == "named_parameters" and isinstance(target, ast.Tuple):
        yield target.elts[-1], value
    else:
        yield target, value


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function with those of inner functions; of a module, without its functions."""
    if not isinstance(node, ast.Module):
        yield from ast.walk(node)
        return
    todo: list[ast.AST] = [node]
    while todo:
        for child in ast.iter_child_nodes(todo.pop()):
            yield child
            todo += [] if isinstance(child, Functions) else [child]


def root(node: ast.expr) -> str:
    """The variable at the beginning of an expression such as ``flat[:n].view(-1)``."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def has_grad(node: ast.AST) -> bool:
    return any(isinstance(at, ast.Attribute) and at.attr == "grad" for at in ast.walk(node))


def reducing_optimizers(script: Script) -> list[tuple[str, ast.Call]]:
    """The classes of optimizers that reduce gradients themselves, each with its first collective for gradients."""
    found: dict[str, ast.Call] = {}
    for call in collectives(script):
        home, scope = script.class_of(call), script.scope(call)
        if not is_optimizer(script, home):
            continue
        named = {name for name in script.bound if "grad" in name and any(at is scope for at, _ in script.bound[name])}
        gradients = Gradients(frozenset(named)).of(scope)
        if any(map(gradients.carries, values_given(call))):
            found.setdefault(getattr(home, "name", ""), call)
    return [*found.items()]


def is_optimizer(script: Script, node: ast.AST) -> bool:
    """Whether a class of the script is an optimizer, by its name or those of its bases."""
    return isinstance(node, ast.ClassDef) and any(map(script.is_optimizer_class, [ast.Name(node.name), *node.bases]))


def unknown_helpers(script: Script) -> Iterator[ast.Call]:
    """The calls of functions of other files that seem to average gradients, by their names or their arguments."""
    own = {function.name for function in script.functions}
    for call in script.calls:
        name = called_name(call)
        if name in own or script.dotted(call.func).startswith("torch."):
            continue
        gets_gradients = re.search("(?i)reduce|average|sync", name) and any(
            map(Gradients().of(script.scope(call)).carries, values_given(call))
        )
        if _BY_NAME.fullmatch(name) or gets_gradients:
            yield call


def collectives(script: Script) -> list[ast.Call]:
    """The calls of a script that add, or average, over the ranks."""
    return [call for call in script.calls if _REDUCING.fullmatch(script.dotted(call.func))]


def unclear_sums(script: Script) -> list[ast.Call]:
    """The collectives in functions that also write into ``.grad``: perhaps they are for gradients."""
    return [call for call in collectives(script) if any(map(_writes_grad, own_nodes(script.scope(call))))]


def _writes_grad(node: ast.AST) -> bool:
    if isinstance(node, ast.Assign | ast.AugAssign):
        return any(map(has_grad, node.targets if isinstance(node, ast.Assign) else [node.target]))
    if isinstance(node, ast.Call):
        is_written = called_name(node) in WRITERS and has_grad(node.func)
        return is_written or (called_name(node) == "vector_to_parameters" and has_grad(node))
    return False
