"""The variables and expressions of a function that hold gradients, in any shape, divided or not."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, replace

from legacy_ddp.debug._port.script import Functions, called_name, pairs

# Calls that change the shape of gradients, but no value.
SHAPE = {"_flatten_dense_tensors", "_unflatten_dense_tensors", "append", "cat", "clone", "contiguous", "detach"}
SHAPE |= {"extend", "flatten", "list", "narrow", "ravel", "reshape", "reshape_as", "split", "squeeze", "stack"}
SHAPE |= {"tuple", "unsqueeze", "view", "view_as", "zip"}
_COPIES = {"_flatten_dense_tensors", "cat", "clone", "contiguous", "flatten", "ravel", "reshape", "stack"}


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
