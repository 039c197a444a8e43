"""The training steps of a script, the place of the call in each, and the wrappers of torch DDP.

A step is a series of ``backward()`` calls and the ``optimizer.step()`` calls that follow them in the same function. A
function of the script that only calls ``backward()`` (or only ``step()``) counts as that call where it is called.
"""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations

from legacy_ddp.debug._port.script import (
    Block,
    Scope,
    Script,
    argument,
    arguments,
    called_name,
    is_local,
    nodes_in,
    pairs,
    values_given,
)

_OPTIMIZER = re.compile(r"(?i)\A(?!.*sched)(.*optim|(.*[._])?opt(_\w+|\d+)?\Z|.*_opt\Z)")
_STEP = re.compile(r"step|optimi[sz]e|optimi[sz]er_step|step_optimi[sz]er")
# The condition of a step that comes once in several micro-batches: `if (index + 1) % 4 == 0:`.
_ACCUMULATES = re.compile(r"(?i) % |accum|update")
_MAX_HELPERS = 5  # helpers that call helpers
_Events = dict[Scope, list[tuple[str, ast.Call]]]
# Methods that return the wrapper itself: `DistributedDataParallel(model).to(device)`.
_CHAINED = ("bfloat16", "cpu", "cuda", "double", "eval", "float", "half", "requires_grad_", "to", "train")
LOOPS = ast.For | ast.AsyncFor | ast.While
_MAX_STEPS = 3  # assignments from a module to its optimizer


@dataclass(frozen=True)
class Step:
    """``scope``: the function with these calls. The calls are in the order of the text; ``steps`` may be empty."""

    scope: Scope
    backwards: tuple[ast.Call, ...]
    steps: tuple[ast.Call, ...]


@dataclass(frozen=True)
class Place:
    """New lines go after ``statement``, or before it if ``is_before``.

    ``is_rare``: the optimizer steps under a condition, and the call does not depend on it.
    """

    statement: ast.stmt
    is_before: bool = False
    is_rare: bool = False

    @property
    def where(self) -> str:
        if self.is_before:
            return f"before line {self.statement.lineno}, under the condition of the step"
        return f"after line {self.statement.end_lineno}"


def find_steps(script: Script) -> list[Step]:
    helpers = _helpers(script)
    events = _events(script, helpers)
    called = {called_name(call) for of_scope in events.values() for _, call in of_scope if is_local(call)}
    counted = {*helpers} & called  # at their calls
    return [
        step
        for scope, of_scope in events.items()
        if getattr(scope, "name", "") not in counted
        for step in _steps_of(script, scope, of_scope)
    ]


def _helpers(script: Script) -> dict[str, str]:
    """By name, the functions that call only ``backward()`` or only ``step()``, directly or through each other."""
    counts = Counter(function.name for function in script.functions)
    helpers: dict[str, str] = {}
    for _ in range(_MAX_HELPERS):
        events = _events(script, helpers)
        kinds = {function.name: {kind for kind, _ in events.get(function, [])} for function in script.functions}
        helpers = {name: kind.pop() for name, kind in kinds.items() if len(kind) == 1 and counts[name] == 1}
    return helpers


def _events(script: Script, helpers: dict[str, str]) -> _Events:
    events: _Events = defaultdict(list)
    for call in sorted(script.calls, key=script.end):
        kind = _kind(script, call) or (helpers.get(called_name(call), "") if is_local(call) else "")
        if kind and not _is_inside(script, call, "no_grad"):  # a training step that a script also uses to evaluate
            events[script.scope(call)].append((kind, call))
    return events


def _kind(script: Script, call: ast.Call) -> str:
    name = called_name(call)
    full = script.dotted(call.func)
    if full == "torch.autograd.backward" or (name == "backward" and isinstance(call.func, ast.Attribute)):
        return "" if full.startswith("torch.distributed.autograd") else "backward"
    return "step" if _STEP.fullmatch(name) and optimizer_of(script, call) else ""


def optimizer_of(script: Script, call: ast.Call) -> str:
    """The optimizer of ``optimizer.step()``, ``scaler.step(optimizer)`` or the like, or an empty text.

    It is recognised by its name, or by an optimizer class in an assignment.
    """
    values = values_given(call) + ([call.func.value] if isinstance(call.func, ast.Attribute) else [])
    texts = [*map(ast.unparse, values)]
    made = [
        text
        for text in texts
        for _, value in script.values.get(text, [])
        if isinstance(value, ast.Call) and script.is_optimizer_class(value.func)
    ]
    return next((text for text in texts if _OPTIMIZER.search(text) or text in made), "")


def _steps_of(script: Script, scope: Scope, events: list[tuple[str, ast.Call]]) -> Iterator[Step]:
    """The steps of a function: each ``backward()`` that follows a ``step()`` begins a new one."""
    groups: list[tuple[list[ast.Call], list[ast.Call]]] = []
    for kind, call in events:
        if kind == "backward":
            if not groups or groups[-1][1]:
                groups.append(([], []))
            groups[-1][0].append(call)
        elif groups:
            groups[-1][1].append(call)
    for backwards, steps in groups:
        yield from _split(script, Step(scope, tuple(backwards), tuple(steps)))


def _split(script: Script, step: Step) -> Iterator[Step]:
    """Divide a step: ``backward()`` calls outside of the block of the last one are a step without an optimizer."""
    depth = _common_depth([script.path(call) for call in (step.backwards[-1], *step.steps)])
    if not step.steps or depth is None:
        yield step
        return
    block = script.path(step.backwards[-1])[depth][0]
    others = [call for call in step.backwards if not _is_inside_of(block, script.path(call))]
    if others:
        yield Step(step.scope, tuple(others), ())
    yield Step(step.scope, tuple(call for call in step.backwards if call not in others), step.steps)


def place_of(script: Script, step: Step) -> Place | None:
    """The place of ``all_reduce()`` in a step: after its backward passes, before gradients are read.

    None if the text does not show it. The place is after the last ``backward()``, or after the loop of micro-batches
    around it. If the step has a condition such as ``if index % 4 == 0:``, the place is under the condition, so that
    other micro-batches send nothing.
    """
    paths = [script.path(call) for call in step.backwards]
    step_paths = [script.path(call) for call in step.steps]
    depth = _common_depth([*paths, *step_paths])
    if depth is None or not step.steps:
        return None
    block = paths[0][depth][0]
    last = max(path[depth][1] for path in paths)
    first = min(path[depth][1] for path in step_paths)
    if last >= first:
        return None
    condition, between = block[first], block[last + 1 : first]
    at_first = [path for path in step_paths if path[depth][1] == first]
    if not isinstance(condition, ast.If) or not all(_is_inside_of(condition.body, path) for path in at_first):
        return Place(block[last], is_rare=any(isinstance(node, ast.Continue) for node in nodes_in(between)))
    if _ACCUMULATES.search(f" {ast.unparse(condition.test)} ") and not any(map(readers, between)):
        return Place(condition.body[0], is_before=True)
    return Place(block[last], is_rare=True)


def _is_inside_of(block: Block, path: list[tuple[Block, int]]) -> bool:
    return any(around is block for around, _ in path)


def _common_depth(paths: list[list[tuple[Block, int]]]) -> int | None:
    """The depth of the common block in which the paths have different statements; None if they are in branches."""
    for depth, places in enumerate(zip(*paths, strict=False)):
        block = places[0][0]
        if any(other is not block for other, _ in places):
            return None
        if len({index for _, index in places}) > 1:
            return depth
    return None


def readers(node: ast.AST) -> list[ast.expr]:
    """The expressions in a node that read gradients: clipping, ``unscale_()`` and ``.grad``."""
    nodes = [child for child in ast.walk(node) if isinstance(child, ast.Call | ast.Attribute)]
    methods = [call.func for call in nodes if isinstance(call, ast.Call)]  # torch.autograd.grad() reads none
    return [
        child
        for child in nodes
        if (child not in methods and getattr(child, "attr", "") == "grad")
        or (isinstance(child, ast.Call) and re.fullmatch(r"unscale_|.*clip.*grad.*", called_name(child)))
    ]


def earlier(script: Script, calls: tuple[ast.Call, ...]) -> list[ast.Call]:
    """The ``backward()`` calls in which torch DDP averages before another one of ``calls`` in the same branch.

    Without calls inside ``no_sync()``. None in a script that sets ``require_backward_grad_sync``.
    """
    if script.has_attribute("require_backward_grad_sync"):
        return []
    counted = [call for call in calls if not _is_inside(script, call, "no_sync")]
    in_sequence = [
        first
        for first, second in combinations(counted, 2)
        if _common_depth([script.path(first), script.path(second)]) is not None
    ]
    return [call for call in counted if call in in_sequence]


def statements_of_one_block(script: Script, calls: tuple[ast.Call, ...], last: ast.stmt) -> list[ast.stmt]:
    """The statements ``loss.backward()`` of all calls, if they are in one block and end with ``last``; else none."""
    found = [script.parent(call) for call in calls]
    statements = [node for node in found if isinstance(node, ast.Expr)]
    blocks = [script.path(statement)[-1][0] for statement in statements]
    is_one = len(statements) == len(calls) and statements[-1] is last and all(block is blocks[0] for block in blocks)
    are_plain = all(not is_local(call) and not call.keywords for call in calls)
    return [*statements] if is_one and are_plain else []


def _is_inside(script: Script, node: ast.AST, context: str) -> bool:
    around = [at for at in script.ancestors(node) if isinstance(at, ast.With | ast.AsyncWith)]
    return any(context in ast.unparse(item) for at in around for item in at.items)


@dataclass
class Wrapper:
    """``made``: calls of the constructor that assign to one variable. ``source``: the module.

    ``holders``: variables that hold the wrapper, each with its function.
    """

    source: str
    made: list[ast.Call]
    holders: list[tuple[Scope, str]] = field(default_factory=list)

    @property
    def names(self) -> set[str]:
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
            module = argument(call, "module", 0)
            self.all.append(Wrapper(ast.unparse(module) if module else "", [call], holders))

    def _targets(self, node: ast.AST) -> Iterator[ast.expr]:
        parent = self.script.parent(node)
        assign = self.script.parent(parent) if isinstance(parent, ast.Tuple) else parent
        if isinstance(assign, ast.Assign):
            yield from (target for target, value in pairs(assign) if value is node)
        elif isinstance(parent, ast.AnnAssign | ast.NamedExpr):
            yield parent.target
        elif _is_same_object(parent, node):
            yield from self._targets(parent)

    def of_step(self, step: Step) -> list[tuple[str, Wrapper]]:
        """The wrappers of the parameters that a step updates, with their names in its function.

        Empty if one of them is not known.
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
        """``names``, and the variables and attributes in the expressions that are assigned to them."""
        # An assignment that mentions its own variable, such as `model, optimizer = load(model, optimizer)`, does not
        # show what the variable is made of.
        for _ in range(_MAX_STEPS):
            found = [(name, _variables(value)) for name in names for _, value in self.script.values.get(name, [])]
            names = names.union(*(variables for name, variables in found if name not in variables))
        return names

    def name_in(self, wrapper: Wrapper, scope: Scope) -> str:
        """The parameter or variable that holds a wrapper in a function; an empty text without either."""
        passed = [name for _, holder in wrapper.holders for name in self._parameters(holder, scope)]
        return next(iter([*passed, *(name for at, name in wrapper.holders if self._reads(scope, name, at))]), "")

    def _parameters(self, text: str, function: Scope) -> list[str]:
        """The parameters of a function to which a call in the script passes the expression ``text``."""
        given = [arguments(function, call).items() for call in self.script.calls_of(function)]
        return [name for of_call in given for name, value in of_call if ast.unparse(value) == text]

    def _reads(self, scope: Scope, name: str, holder: Scope) -> bool:
        """Whether ``name`` in the function ``scope`` is the variable of the function ``holder``."""
        script, root = self.script, re.split(r"\W", name, maxsplit=1)[0]
        if root == "self":
            return script.class_of(scope) is script.class_of(holder)
        while scope is not holder:
            if any(at is scope for at, _ in script.bound[root]):
                # A variable of the same name may hold the same wrapper: a parameter, or `generator, critic = nets`.
                values = [value for at, value in script.values.get(name, []) if at is scope]
                calls = [node for node in nodes_in(values) if isinstance(node, ast.Call)]
                return not calls or any(call in script.calls_of(holder) for call in calls)
            if isinstance(scope, ast.Module):
                return False
            scope = script.scope(scope)
        return True

    def _is_of_a_loop(self, wrapper: Wrapper, step: Step) -> bool:
        """Whether a loop makes a new wrapper in each iteration, and the step is outside of the loop."""
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
        """The object of a method call, such as ``model`` of ``model.eval()``; an empty text if it is no wrapper."""
        text = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        scope = self.script.scope(call)
        return text if text in [self.name_in(wrapper, scope) for wrapper in self.all] else ""


def _variables(value: ast.expr) -> set[str]:
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
