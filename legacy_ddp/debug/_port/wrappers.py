"""The wrappers of a script: the uses of torch DDP's class, the variables that hold a wrapper, and their optimizers."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from legacy_ddp.debug._port.script import Functions, Scope, Script, called_name, pairs
from legacy_ddp.debug._port.steps import Step, optimizer_of

# Methods that return the wrapper itself: `DistributedDataParallel(model).to(device)`.
_CHAINED = ("bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "requires_grad_", "to", "train")
LOOPS = ast.For | ast.AsyncFor | ast.While
_MAX_STEPS = 3  # assignments from a module to its optimizer


@dataclass
class Wrapper:
    """A call of the constructor, or several that assign to one variable.

    ``source``: the module in it. ``holders``: variables that hold the wrapper, each with its function.
    """

    source: str
    made: list[ast.Call]
    holders: list[tuple[Scope, str]] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The module and the variables."""
        return {self.source, *(name for _, name in self.holders)}


class Wrappers:
    """All wrappers of a script. ``unassigned``: calls of the constructor whose result no variable holds."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.uses = [node for node in script.nodes if script.is_ddp(node)]
        self.made = [call for call in script.calls if call.func in self.uses]
        self.all: list[Wrapper] = []
        self.unassigned: list[ast.Call] = []
        for call in self.made:
            self._add(call)

    def _add(self, call: ast.Call) -> None:
        holders = [
            (self.script.scope(target), ast.unparse(target))
            for target in self._targets(call)
            if not isinstance(target, ast.Subscript)
        ]
        if not holders:
            self.unassigned.append(call)
        elif same := [wrapper for wrapper in self.all if {*wrapper.holders} & {*holders}]:
            same[0].made.append(call)
        else:
            module = [*call.args, *(word.value for word in call.keywords if word.arg == "module")]
            self.all.append(Wrapper(ast.unparse(module[0]) if module else "", [call], holders))

    def _targets(self, node: ast.AST) -> Iterator[ast.expr]:
        """The variables to which the value of an expression is assigned."""
        parent = self.script.parent(node)
        assign = self.script.parent(parent) if isinstance(parent, ast.Tuple) else parent
        if isinstance(assign, ast.Assign):
            yield from (target for target, value in pairs(assign) if value is node)
        elif isinstance(parent, ast.AnnAssign | ast.NamedExpr):
            yield parent.target
        elif _is_same_object(parent, node):
            yield from self._targets(parent)

    def of_step(self, step: Step) -> list[tuple[str, Wrapper]]:
        """The wrappers whose parameters the optimizers of a step have, with their names in its function.

        The list is empty if one of them is not known.
        """
        wanted: list[Wrapper] = []
        for optimizer in {optimizer_of(self.script, call) for call in step.steps} or {""}:
            of_call = self._of_optimizer(self._mentioned({optimizer}))
            if not of_call:
                return []
            wanted += of_call
        named = [(self.name_in(wrapper, step.scope), wrapper) for wrapper in self.all if wrapper in wanted]
        return named if all(name and not self._is_of_a_loop(wrapper, step) for name, wrapper in named) else []

    def _of_optimizer(self, mentioned: set[str]) -> list[Wrapper]:
        """The wrappers that the value of an optimizer mentions; the only wrapper if it mentions no other parameters."""
        found = [wrapper for wrapper in self.all if wrapper.names & mentioned]
        if found or len(self.all) != 1:
            return found
        owners = {name.rpartition(".")[0] for name in mentioned if name.endswith(("_parameters", ".parameters"))}
        return self.all if not owners or owners & self._mentioned(self.all[0].names) else []

    def _mentioned(self, names: set[str]) -> set[str]:
        """The variables and attributes from which the values of variables are made.

        An assignment that mentions its own variable, such as ``model, optimizer = load(model, optimizer)``, only hands
        it over.
        """
        for _ in range(_MAX_STEPS):
            found = [(name, _variables(value)) for name in names for _, value in self.script.values.get(name, [])]
            names = names.union(*(variables for name, variables in found if name not in variables))
        return names

    def name_in(self, wrapper: Wrapper, scope: Scope) -> str:
        """The name of a wrapper in a function: of its parameter or variable; an empty text without either."""
        passed = [name for _, holder in wrapper.holders for name in self._parameters(holder, scope)]
        return next(iter([*passed, *(name for at, name in wrapper.holders if self._reads(scope, name, at))]), "")

    def _parameters(self, text: str, function: Scope) -> list[str]:
        """The parameters of a function to which a call in the script passes the expression ``text``."""
        if not isinstance(function, Functions):
            return []
        names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args)]
        found = []
        for call in self.script.calls_of(function):
            own = names[isinstance(call.func, ast.Attribute) :]
            pairs = [*zip(own, call.args, strict=False), *((word.arg, word.value) for word in call.keywords)]
            found += [name for name, value in pairs if name and ast.unparse(value) == text]
        return found

    def _reads(self, scope: Scope, name: str, holder: Scope) -> bool:
        """Whether a function reads this variable of another function or of its own."""
        script, root = self.script, re.split(r"\W", name, maxsplit=1)[0]
        if root == "self":
            return script.class_of(scope) is script.class_of(holder)
        while scope is not holder:
            if any(at is scope for at, _ in script.bound[root]):
                # The same name may be handed over: as a parameter, or in `generator, critic = nets`.
                values = [value for at, value in script.values.get(name, []) if at is scope]
                calls = [node for value in values for node in ast.walk(value) if isinstance(node, ast.Call)]
                return not calls or any(call in script.calls_of(holder) for call in calls)
            if isinstance(scope, ast.Module):
                return False
            scope = script.scope(scope)
        return True

    def _is_of_a_loop(self, wrapper: Wrapper, step: Step) -> bool:
        """Whether a variable holds another wrapper at each turn of a loop, and the step stands outside of it."""
        around = [*self.script.ancestors(step.backwards[0])]
        loops = [node for call in wrapper.made for node in self.script.ancestors(call) if isinstance(node, LOOPS)]
        return any(loop not in around for loop in loops)

    def is_conditional(self, wrapper: Wrapper, statement: ast.stmt) -> bool:
        """Whether a statement may run although the wrapper was not made."""
        around = [block for block, _ in self.script.path(statement)]
        for call in wrapper.made:
            if any(isinstance(node, ast.IfExp) for node in self.script.ancestors(call)):
                return True
            for block, _ in self.script.path(call):
                is_around = any(block is other for other in around)
                if _is_branch(self.script.parent(block[0])) and not is_around:
                    return True
        return False

    def name_at(self, call: ast.Call) -> str:
        """The object of a method, such as ``model`` of ``model.eval()``; an empty text if it is no wrapper."""
        text = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        scope = self.script.scope(call)
        return text if text in [self.name_in(wrapper, scope) for wrapper in self.all] else ""


def _variables(value: ast.expr) -> set[str]:
    """The variables and attributes in an expression."""
    return {ast.unparse(node) for node in ast.walk(value) if isinstance(node, ast.Name | ast.Attribute)}


def _is_same_object(parent: ast.AST, node: ast.AST) -> bool:
    """Whether the value of ``parent`` is that of ``node``, or wraps it: ``.to(device)``, ``torch.compile()``."""
    if isinstance(parent, ast.Attribute):
        return parent.attr in _CHAINED
    if isinstance(parent, ast.Call):
        is_method = parent.func is node and isinstance(node, ast.Attribute)
        return is_method or (node in parent.args[:1] and called_name(parent) == "compile")
    return isinstance(parent, ast.IfExp) and parent.test is not node


def _is_branch(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return "__main__" not in ast.unparse(node.test)
    return isinstance(node, ast.Try | ast.ExceptHandler | ast.match_case)
