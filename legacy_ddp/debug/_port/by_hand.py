"""Averages of gradients by hand in a script, and the lines that ``all_reduce_gradients()`` replaces.

The search begins at a collective. It adds the statements around it that only collect gradients, divide them or write
them back. If the text does not show a mean over all ranks, or if the lines also do something else, the average has a
``problem``, and nothing is changed.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeGuard

from legacy_ddp.debug._port.gradients import ALIASES, SHAPE, WRITERS, Gradients, has_grad, is_optimizer, items, root
from legacy_ddp.debug._port.script import (
    Block,
    Functions,
    OtherFiles,
    Script,
    argument,
    arguments,
    called_name,
    nodes_in,
    values_given,
)

# Other calls that may be in lines that only average.
_PLAIN = {"all_reduce", "copy_", "div", "div_", "element_size", "enumerate", "float", "get_world_size", "int", "len"}
_PLAIN |= {"mul_", "named_parameters", "no_grad", "numel", "parameters", "range", "size", "wait"}
_METHODS_THAT_CAST = ("float", "int")
_STATEMENTS = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr | ast.For | ast.If | ast.With | ast.Pass
_STATEMENTS |= ast.Continue | ast.Return
# Names of divisors that are the number of ranks: for certain, and probably.
_WORLD_SIZE = re.compile(r"(?i)(.*\W)?\w*world_?size(\(.*\))?|os\.(getenv|environ)\W.*WORLD_SIZE.*")
_COUNT = re.compile(r"(?i)(.*\W)?\w*(num_?(procs?|processes|gpus?|ranks|replicas)|n_?(gpus?|procs?|ranks?))(\(.*\))?")
# A divisor with one of these, such as `4 * world_size`, is not the number of ranks.
_ARITHMETIC = ast.BinOp | ast.UnaryOp | ast.BoolOp | ast.Compare | ast.IfExp
_HOOKS = ("queue_callback", "register_hook", "register_post_accumulate_grad_hook")


@dataclass(frozen=True)
class Average:
    """``statements``: of one block, which the new call replaces. ``source``: its argument, a module or parameters.

    ``problem``: why the user decides; empty without a problem. ``helper``: the function of this script that the lines
    called.
    """

    call: ast.Call
    statements: tuple[ast.stmt, ...]
    source: str = ""
    group: str = ""
    problem: str = ""
    helper: ast.AST | None = None
    divides_first: bool = False
    divisor: str = ""  # probably the number of ranks

    @property
    def replacement(self) -> str:
        """The new call without the name of its function."""
        return f"({self.source or 'module'}{f', process_group={self.group}' if self.group else ''})"

    def text(self, call: str, problem: str) -> str:
        """The remark about the lines. ``call``: the new call. ``problem``: why it does not replace them, or empty."""
        first, last = self.statements[0].lineno, self.statements[-1].end_lineno
        lines = f"line {first} reduces" if first == last else f"lines {first} to {last} reduce"
        text = f"{lines} gradients by hand"
        if problem:
            return (
                f"{text}, {problem}; {call} takes the place of the collective and of a division by the number of ranks"
            )
        text += f"; {call} takes their place"
        if self.divisor:
            text += f"; they divide by {self.divisor}, and the call by the number of ranks"
        if self.divides_first:
            text += "; they divide before the sum, which may round differently"
        if self.helper is not None:
            name, begin, end = (getattr(self.helper, field) for field in ("name", "lineno", "end_lineno"))
            text += f"; delete {name}() in lines {begin} to {end}, if nothing else calls it"
        return text


@dataclass(frozen=True)
class Sum:
    """What lines do with gradients: operations and groups of collectives as text, and divisors."""

    operations: frozenset[str]
    groups: frozenset[str]
    divisors: tuple[ast.expr, ...]
    divides_first: bool


def find_averages(script: Script, others: OtherFiles) -> list[Average]:
    """The averages of a script, in the order of the text. ``others``: the files that it imports."""
    if not script.has_attribute("grad"):
        return []
    gradients = cache(lambda scope: (Gradients().of(scope), ALIASES.of(scope)))
    calls = [call for call in script.calls if not is_optimizer(script, script.class_of(call))]
    found = [_Search(script, others, call, *gradients(script.scope(call))).average() for call in calls]
    return [average for average in found if average]


def summarise(script: Script, nodes: list[ast.AST], gradients: Gradients) -> Sum:
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    collectives = [call for call in calls if is_sum(script, call, gradients)]
    operations = [argument(call, "op", 1) for call in collectives]
    groups = [argument(call, "group", 2) for call in collectives]
    divisors = [(node, divisor) for node in nodes for divisor in _divisors(node, gradients)]
    first = min((script.start(call) for call in collectives), default=0)
    return Sum(
        frozenset("SUM" if node is None else ast.unparse(node).rpartition(".")[2].upper() for node in operations),
        frozenset("" if isinstance(node, ast.Constant | None) else ast.unparse(node) for node in groups),
        tuple(value for _, divisor in divisors for value in _values(script, divisor)),
        any(script.start(node) < first for node, _ in divisors),  # type: ignore[arg-type]
    )


def _values(script: Script, node: ast.expr) -> list[ast.expr]:
    """The possible values of an expression: of a variable, what its function assigns; ``1 / x`` for each value of x."""
    if _is_reciprocal(node):
        return [found.right if _is_reciprocal(found) else _reciprocal(found) for found in _values(script, node.right)]
    values = [value for at, value in script.values.get(ast.unparse(node), []) if at is script.scope(node)]
    if not values or _is_count(node, _WORLD_SIZE, _COUNT):
        return [node]
    return [found for value in values for found in _values(script, value)]


def _is_reciprocal(node: ast.expr) -> TypeGuard[ast.BinOp]:
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)):
        return False
    return isinstance(node.left, ast.Constant) and node.left.value == 1


def _reciprocal(node: ast.expr) -> ast.BinOp:
    return ast.BinOp(ast.Constant(1), ast.Div(), node)


def is_sum(script: Script, call: ast.Call, gradients: Gradients) -> bool:
    return script.dotted(call.func) == "torch.distributed.all_reduce" and gradients.carries(argument(call, "tensor", 0))


def _is_written(node: ast.AST, gradients: Gradients, aliases: Gradients) -> bool:
    """Whether a node writes a value made of gradients into ``.grad``, or into a list of gradients."""
    if isinstance(node, ast.Assign):
        return any(map(has_grad, node.targets)) and gradients.carries(node.value)
    if isinstance(node, ast.Call) and called_name(node) == "copy_":
        return aliases.carries(getattr(node.func, "value", None)) and any(map(gradients.carries, node.args))
    return False


def _divisors(node: ast.AST, gradients: Gradients) -> Iterator[ast.expr]:
    """The divisors of gradients in one node. A factor ``x`` counts as the divisor ``1 / x``."""
    if isinstance(node, ast.BinOp | ast.AugAssign) and isinstance(node.op, ast.Div | ast.Mult):
        left, right = (node.left, node.right) if isinstance(node, ast.BinOp) else (node.target, node.value)
        if gradients.carries(left):
            yield right if isinstance(node.op, ast.Div) else _reciprocal(right)
    elif isinstance(node, ast.Call) and called_name(node) in ("div", "div_", "mul_"):
        owner = getattr(node.func, "value", None)
        for value in node.args[:1] if gradients.carries(owner) else ():
            yield _reciprocal(value) if called_name(node) == "mul_" else value


class _Search:
    """The search for the lines around one collective, or around one call of a function that sums gradients."""

    def __init__(
        self, script: Script, others: OtherFiles, call: ast.Call, gradients: Gradients, aliases: Gradients
    ) -> None:
        self.script, self.others, self.call = script, others, call
        self.scope = script.scope(call)
        self.gradients, self.aliases = gradients, aliases
        self.path = script.path(call)
        self.is_conditional = False

    def average(self) -> Average | None:
        """None if the call is not about gradients, or if nothing is written back into them."""
        helper, given = self._helper()
        if not given and not is_sum(self.script, self.call, self.gradients):
            return None
        run = self._run()
        nodes = nodes_in(run)
        sources = self._sources(run)
        source = next(iter(sources)) if len(sources) == 1 else ""
        if _bound(run) & {*re.findall(r"\w+", source)} or self.script.has_attribute(*_HOOKS):
            source = ""  # the name is not known at the place of the new call
        found = Average(self.call, tuple(run), source, helper=helper if helper in self.script.functions else None)
        if not given and not is_sum(self.script, self.call, self.aliases) and not any(map(self._writes, nodes)):
            rest = [node for node in ast.walk(self.scope) if getattr(node, "lineno", 0) > self.call.lineno]
            return replace(found, problem=self._others(run)) if any(map(self._writes, rest)) else None
        summary = summarise(self.script, nodes, self.gradients)
        if helper is not None:
            summary = self._of_helper(helper, given, summary)
        problem = "; ".join(filter(None, [self._problem(run, nodes, source), self._kind(summary)]))
        counts = [ast.unparse(node) for node in summary.divisors if not _is_count(node, _WORLD_SIZE)]
        return replace(
            found,
            group=next(iter(summary.groups - {""}), ""),
            problem=problem,
            divides_first=summary.divides_first,
            divisor=next(iter(counts), ""),
        )

    def _helper(self) -> tuple[ast.AST | None, set[str]]:
        """The function that is called, and its parameters that get gradients; None if it does not sum gradients."""
        name = called_name(self.call)
        if name in _PLAIN | SHAPE or not any(map(self.gradients.carries, values_given(self.call))):
            return None, set()
        script = self._script_of_helper()
        functions = [function for function in script.functions if function.name == name]
        if len(functions) != 1:
            return None, set()
        (function,) = functions
        given = {name for name, value in arguments(function, self.call).items() if self.gradients.carries(value)}
        gradients = Gradients(frozenset(given)).of(function)
        aliases = replace(ALIASES, names=frozenset(given)).of(function)
        nodes = [*ast.walk(function)] if given else []
        sums = [node for node in nodes if isinstance(node, ast.Call) and is_sum(script, node, gradients)]
        is_in_place = any(is_sum(script, call, aliases) for call in sums)
        is_in_place |= any(_is_written(node, gradients, aliases) for node in nodes)
        return (function, given) if sums and is_in_place else (None, set())

    def _script_of_helper(self) -> Script:
        module = self.script.dotted(self.call.func).rpartition(".")[0]
        return (self.others.script(module) if module else None) or self.script

    def _of_helper(self, function: ast.AST, given: set[str], outside: Sum) -> Sum:
        """The sum of a function, with the arguments of this call in place of its parameters."""
        script = self._script_of_helper()
        inside = summarise(script, [*ast.walk(function)], Gradients(frozenset(given)).of(function))
        values = arguments(function, self.call)
        divisors = [values.get(ast.unparse(divisor), divisor) for divisor in inside.divisors]
        groups = [ast.unparse(values[group]) if group in values else group for group in inside.groups]
        return replace(inside, groups=frozenset(groups), divisors=(*outside.divisors, *divisors))

    def _run(self) -> list[ast.stmt]:
        """The statements of one block around the call that only average gradients."""
        for depth in range(len(self.path) - 1, -1, -1):
            block, index = self.path[depth]
            run = self._extended(block, index)
            if not self._needed(run):
                return run
            around = self.script.parent(block[index])
            self.is_conditional |= depth > 0 and isinstance(around, ast.If) and not self._is_about_grad(around.test)
        return run

    def _extended(self, block: Block, index: int) -> list[ast.stmt]:
        first, last = index, index
        for at in range(index + 1, len(block)):
            if not self._is_plain(block[at]):
                break
            run = block[first : last + 1]
            used = (self.gradients.names & (_loaded(run) | _bound(run))) | _mutated(run)
            if has_grad(block[at]) or used & _loaded([block[at]]):
                last = at
        while first > 0 and self._belongs(block[first - 1], block[first : last + 1]):
            first -= 1
        return block[first : last + 1]

    def _belongs(self, statement: ast.stmt, run: list[ast.stmt]) -> bool:
        """Whether a statement before the lines only prepares their values."""
        made = _bound([statement]) | _mutated([statement])
        is_source = any(source in made for source in self._sources(run))
        is_used = made & (_loaded(run) | _bound(run))
        if not self._is_plain(statement) or is_source:
            return False
        if isinstance(statement, ast.If) and any(isinstance(node, ast.Return) for node in ast.walk(statement)):
            return self._is_about_grad(statement.test) and self._ends_function(run)
        return bool(is_used) and not self._read_elsewhere(made, [statement, *run])

    def _ends_function(self, run: list[ast.stmt]) -> bool:
        return isinstance(self.scope, Functions) and self.scope.body[-1] is run[-1]

    def _is_plain(self, statement: ast.stmt) -> bool:
        """Whether a statement only collects, divides, counts or writes gradients."""
        for node in ast.walk(statement):
            if (isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS)) or self._is_other_arithmetic(node):
                return False
            if isinstance(node, ast.Return) and (node.value is not None or not isinstance(statement, ast.If)):
                return False
            if isinstance(node, ast.Call) and node is not self.call:
                name, is_method = called_name(node), isinstance(node.func, ast.Attribute)
                if name not in SHAPE | _PLAIN or (is_method and name in _METHODS_THAT_CAST):
                    return False
            if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                if not all(isinstance(target, ast.Name) or has_grad(target) or _is_item(target) for target in targets):
                    return False
        return True

    def _is_other_arithmetic(self, node: ast.AST) -> bool:
        """Whether a node adds something to gradients, such as weight decay, or changes their sign."""
        if isinstance(node, ast.BinOp | ast.AugAssign):
            sides = [node.target] if isinstance(node, ast.AugAssign) else [node.left, node.right]
            return not isinstance(node.op, ast.Div | ast.Mult) and any(map(self.gradients.carries, sides))
        return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and self.gradients.carries(node.operand)

    def _needed(self, run: list[ast.stmt]) -> bool:
        """Whether the lines use gradients, or variables of a loop, from the code around them."""
        made, loaded = _bound(run), _loaded(run)
        around = [node for node in self.script.ancestors(run[0]) if isinstance(node, ast.For)]
        of_loops = {target.id for loop in around for target, _ in items(loop) if isinstance(target, ast.Name)}
        roots = {root(node) for node in nodes_in(run) if isinstance(node, ast.Attribute) and has_grad(node)}
        return bool(((loaded & self.gradients.names) - made) | ((roots & of_loops) - made))

    def _is_about_grad(self, test: ast.expr) -> bool:
        attributes = [node for node in ast.walk(test) if isinstance(node, ast.Attribute)]
        calls = [node for node in ast.walk(test) if isinstance(node, ast.Call)]
        functions = [call.func for call in calls]
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name) and node not in functions}
        return (
            all(called_name(call) == "len" for call in calls)
            and all(node.attr in ("grad", "requires_grad") for node in attributes)
            and names <= {*map(root, attributes)} | self.gradients.names
        )

    def _writes(self, node: ast.AST) -> bool:
        return _is_written(node, self.gradients, self.aliases)

    def _sources(self, run: list[ast.stmt]) -> set[str]:
        """The modules or lists of parameters whose ``.grad`` the lines use; an empty text for an unknown one."""
        found = set()
        for node in nodes_in(run):
            if isinstance(node, ast.Attribute) and node.attr == "grad":
                found.add(self._source(node.value) if isinstance(node.value, ast.Name) else "")
        return found

    def _source(self, name: ast.Name) -> str:
        for target, value in (item for loop in self._loops_around(name) for item in items(loop)):
            if isinstance(target, ast.Name) and target.id == name.id:
                return self._text(value)
        return ""

    def _loops_around(self, node: ast.AST) -> Iterator[ast.For | ast.comprehension]:
        """The loops and comprehensions around a node, inner ones first."""
        for around in self.script.ancestors(node):
            yield from (
                loop
                for loop in getattr(around, "generators", [around])
                if isinstance(loop, ast.For | ast.comprehension)
            )

    def _text(self, value: ast.expr) -> str:
        """The text of an expression; for the parameters of a module, that of the module."""
        name = called_name(value) if isinstance(value, ast.Call) else ""
        if isinstance(value, ast.Call) and name in ("list", "tuple") and len(value.args) == 1:
            return self._text(value.args[0])
        if isinstance(value, ast.Call) and name in ("parameters", "named_parameters") and not value.args:
            return ast.unparse(value.func.value) if isinstance(value.func, ast.Attribute) else ""
        if isinstance(value, ast.Name):
            values = [value for scope, value in self.script.values.get(value.id, []) if scope is self.scope]
            if len(values) == 1 and isinstance(values[0], ast.ListComp) and self._is_filter(values[0]):
                return self._text(values[0].generators[0].iter)
        return ast.unparse(value)

    def _is_filter(self, value: ast.ListComp) -> bool:
        (loop, *others), element = value.generators, ast.unparse(value.elt)
        return not others and element == ast.unparse(loop.target) and all(map(self._is_about_grad, loop.ifs))

    def _problem(self, run: list[ast.stmt], nodes: list[ast.AST], source: str) -> str:
        tests = [node.test for node in nodes if isinstance(node, ast.If)]
        tests += [test for node in nodes if isinstance(node, ast.comprehension) for test in node.ifs]
        made = _bound(run)
        if self.script.has_attribute(*_HOOKS):
            return "perhaps in a hook: the call goes behind backward(), not into it"
        if not all(map(self._is_plain, run)):
            return self._others(run)
        if self.is_conditional or not all(map(self._is_about_grad, tests)):
            return "under a condition of their own: keep it where it is not about gradients"
        if not source:
            return "but the module is not seen: the call takes a module, or a list of parameters"
        if self._read_elsewhere(made | _mutated(run), run):
            return "and other lines read what they compute"
        return ""

    def _kind(self, summary: Sum) -> str:
        """What is computed; empty if it is a mean over the ranks of one group."""
        divisors = [divisor for divisor in summary.divisors if ast.unparse(divisor) not in ("1", "1.0", "float(1)")]
        others = [divisor for divisor in divisors if not _is_count(divisor, _WORLD_SIZE, _COUNT)]
        if len(summary.groups) > 1 or summary.operations not in ({"SUM"}, {"AVG"}):
            return "in several groups, or with another operation than a sum"
        if others or (summary.operations == {"AVG"} and divisors):
            first = [*others, *divisors][0]
            done = (
                f"multiply by {ast.unparse(first.right)}"
                if _is_reciprocal(first)
                else f"divide by {ast.unparse(first)}"
            )
            return (
                f"and {done}: the call divides by the number of ranks alone; for a number of items pass sample_size=n, "
                "of this rank, and keep any other factor"
            )
        if not divisors and summary.operations == {"SUM"}:
            return (
                "and do not divide by the number of ranks, as the call does: remove a division by this number "
                "elsewhere, of the loss, say; if there is none, multiply the loss by this number"
            )
        return ""

    def _others(self, run: list[ast.stmt]) -> str:
        """A text about the first statement in the lines or behind them that does something else."""
        block, _ = self.script.path(run[-1])[-1]
        inside = [node for node in nodes_in(run) if isinstance(node, ast.stmt)]
        others = [at for at in [*inside, *block[block.index(run[-1]) + 1 :]] if not self._is_plain(at)]
        for at in others:
            if not any(node in others for node in ast.walk(at) if node is not at):
                return f"but line {at.lineno} is about something else, too"
        return "but where they are written back is not seen"

    def _read_elsewhere(self, made: set[str], run: list[ast.stmt]) -> bool:
        """Whether other lines of the function read one of the variables ``made``, which the lines ``run`` assign."""
        inside = {*nodes_in(run)}
        begin, end = self.script.start(run[0]), self.script.end(run[-1])
        names = [node for node in ast.walk(self.scope) if isinstance(node, ast.Name) and node not in inside]
        stores = [node for node in names if not isinstance(node.ctx, ast.Load)]
        for node in names:
            if node.id in made and isinstance(node.ctx, ast.Load) and not self._is_of_loop(node):
                at = self.script.start(node)
                before = [self.script.start(store) for store in stores if store.id == node.id]
                if not any(store < at and (store > end or at < begin) for store in before):
                    return True
        return False

    def _is_of_loop(self, name: ast.Name) -> bool:
        targets = nodes_in(loop.target for loop in self._loops_around(name))
        return any(isinstance(at, ast.Name) and at.id == name.id for at in targets)


def _is_count(divisor: ast.expr, *patterns: re.Pattern[str]) -> bool:
    if any(isinstance(node, _ARITHMETIC) for node in ast.walk(divisor)):
        return False
    if isinstance(divisor, ast.Call) and called_name(divisor) in _METHODS_THAT_CAST and len(divisor.args) == 1:
        return _is_count(divisor.args[0], *patterns)
    return any(pattern.fullmatch(ast.unparse(divisor)) for pattern in patterns)


def _is_item(node: ast.expr) -> bool:
    """Whether the target of an assignment is an item of a variable, or several variables."""
    if isinstance(node, ast.Tuple):
        return all(isinstance(item, ast.Name) for item in node.elts)
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)


def _bound(statements: list[ast.stmt]) -> set[str]:
    return _names(statements)[0]


def _loaded(statements: list[ast.stmt]) -> set[str]:
    return _names(statements)[1]


def _names(statements: list[ast.stmt]) -> tuple[set[str], set[str]]:
    """The variables that statements assign, and those that they read; ``a += 1`` counts as a read."""
    nodes = nodes_in(statements)
    changed = [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    bound: set[str] = set()
    loaded: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            (loaded if isinstance(node.ctx, ast.Load) or node in changed else bound).add(node.id)
    return bound, loaded


def _mutated(statements: list[ast.stmt]) -> set[str]:
    """The variables whose values the statements change in place."""
    found = set()
    for node in nodes_in(statements):
        written: ast.expr | None = None
        if isinstance(node, ast.AugAssign):
            written = node.target
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and called_name(node) in WRITERS:
            written = node.func.value
        if written is not None and not has_grad(written):
            found.add(root(written))
    return found - {""}
