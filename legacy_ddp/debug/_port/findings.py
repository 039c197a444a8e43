"""Findings in a script of torch DDP: changes of its text, and remarks, each with a page of the documentation."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from legacy_ddp.debug._port.by_hand import Average, find_averages
from legacy_ddp.debug._port.gradients import reducing_optimizers, unclear_sums, unknown_helpers
from legacy_ddp.debug._port.script import Edit, OtherFiles, Script, UnclearError, called_name
from legacy_ddp.debug._port.steps import (
    LOOPS,
    Place,
    Step,
    Wrappers,
    earlier,
    find_steps,
    optimizer_of,
    place_of,
    readers,
    statements_of_one_block,
)

_OURS = "LegacyDistributedDataParallel"
_IMPORT = f"from legacy_ddp import {_OURS}"
_FUNCTION = "all_reduce_gradients"
_MOVE = "torch DDP moves batches to the device, this wrapper does not"
_ANY_GRAPH = "no hook in backward waits for a parameter, so each step may use different ones"
_NO_OVERLAP = "it tunes the overlap with backward, and there is no overlap"
_BUFFERS = "forward sends no buffers; broadcast_buffers() does, before an evaluation and before a checkpoint"
_NO_FORWARD_SYNC = "forward sends no buffers here, so that False needs nothing in its place"
_FIRST_BUFFERS = (
    "the constructor sends those of rank 0 once, which torch DDP with False does not; if ranks start with different "
    "buffers, and keep them, name these in ignore="
)
_NO_BUFFERS = f"forward sends no buffers here, but {_FIRST_BUFFERS}"
_ONE_RANK = re.compile(r"(?i)(\b|_)rank(\(\))? == 0|\bnot [\w.]*rank\b|(\b|_)(master|main)(_process|_rank)?\b")
_BY_HAND = "nothing takes its place; read what it was for"
# Arguments of torch DDP in its order: the name here, or why it is removed; whether the user decides.
ARGUMENTS = {
    "module": ("module", False),
    "device_ids": (_MOVE, True),
    "output_device": ("", False),
    "dim": ("", False),
    "broadcast_buffers": (_BUFFERS, False),
    "init_sync": ("init_sync", False),
    "process_group": ("process_group", False),
    "bucket_cap_mb": (_NO_OVERLAP, False),
    "find_unused_parameters": (_ANY_GRAPH, False),
    "check_reduction": (_ANY_GRAPH, False),
    "gradient_as_bucket_view": ("gradient_as_bucket_view", False),
    "static_graph": (_ANY_GRAPH, False),
    "delay_all_reduce_named_params": (_BY_HAND, True),
    "param_to_hook_all_reduce": (_BY_HAND, True),
    "mixed_precision": ("torch.autocast casts, and reduce_dtype= is the dtype of gradients on the wire", True),
    "device_mesh": ("process_group", False),
    "skip_all_reduce_unused_params": (_ANY_GRAPH, False),
    "forward_sync_buffers": (_BUFFERS, False),
    "bucket_cap_mb_list": (_NO_OVERLAP, False),
    "batched_grad_copy": (_NO_OVERLAP, False),
    "lazy_bucket_allocation": (_NO_OVERLAP, False),
}
# Patterns of names (the full name that imports give, or a dot and the attribute), whether the user decides, page, text.
_NAMES = (
    (r"\.no_sync", False, "accumulation", "no_sync() works here, too, but is not needed: backward() sends nothing"),
    (r"\.register_comm_hook", False, "hooks", "the hook works here, too: it runs inside all_reduce()"),
    (r"torch\.nn\.SyncBatchNorm", False, "autograd", "SyncBatchNorm sends its statistics itself, as under torch DDP"),
    (r"torch\.distributed\.algorithms\.(join\.)?Join", True, "hooks", "in Join([...]) the wrapper comes first"),
    (r"torch\.distributed\.checkpoint\.state_dict\.\w+", True, "checkpoints", "pass model.module, not the wrapper"),
    (r"torch\.distributed\.autograd\.\w+", True, "members", "all_reduce() reads .grad; these gradients are not there"),
    (
        r"\.(_get_ddp_logging_data|_register_builtin_comm_hook|_register_fused_optim|_set_static_graph"
        r"|require_backward_grad_sync|require_forward_param_sync)",
        True,
        "members",
        "this is of torch DDP alone; the page says what to write",
    ),
)


@dataclass(frozen=True)
class Finding:
    """Changes, a remark, or both.

    ``page``: a key of ``PAGES`` (:mod:`legacy_ddp.debug._port`). ``is_open``: the user decides.
    """

    line: int
    page: str
    text: str
    is_open: bool = True
    edits: tuple[Edit, ...] = ()


def find(script: Script, others: OtherFiles) -> list[Finding]:
    """The findings in the order of the text. If the class cannot be replaced, this is the only finding."""
    wrappers = Wrappers(script)
    try:
        found = [*_on_class(wrappers)]
    except UnclearError as error:
        return [Finding(error.line, "class", f"nothing is changed: {error}")]
    by_hand = [*_on_averages(wrappers, find_averages(script, others)), *_on_optimizers(wrappers, others)]
    if not by_hand and not wrappers.made and find_steps(script):
        by_hand = [*_on_unknown_helpers(script)] or [*_on_unclear_sums(script)]
    rules = [_on_arguments, _on_steps, _on_settings, _on_batch_norm, _on_evaluation, _on_statistics, _on_names]
    # A file that averages by hand and does not use the class has no training steps that need all_reduce().
    for rule in rules if wrappers.uses or not by_hand else [_on_names]:
        found += rule(wrappers)
    return sorted([*found, *by_hand], key=lambda finding: finding.line)


def _on_averages(wrappers: Wrappers, averages: list[Average]) -> Iterator[Finding]:
    script, is_taken = wrappers.script, bool(wrappers.script.bound[_FUNCTION])
    function, line = (f"legacy_ddp.{_FUNCTION}", "import legacy_ddp") if is_taken else (_FUNCTION, "")
    is_new = True
    for average in averages:
        first, last, call = average.statements[0], average.statements[-1], f"{function}{average.replacement}"
        problem = average.problem
        if any(average.source in wrapper.names for wrapper in wrappers.all):
            problem = "of a module that torch DDP wraps here; the all_reduce() of the wrapper takes their place"
        edits: list[Edit] = []
        try:
            if not problem:
                edits = [script.block_replacement(first, last, call)]
                if is_new:
                    edits.append(script.new_import(line or f"from legacy_ddp import {_FUNCTION}"))
                is_new = False
        except UnclearError as error:
            edits, problem = [], str(error)
        yield Finding(first.lineno, "hand", average.text(call, problem), bool(problem), tuple(edits))
        yield from () if problem else _on_clipping_before(script, average)


def _on_clipping_before(script: Script, average: Average) -> Iterator[Finding]:
    first = script.start(average.statements[0])
    scope = script.scope(average.call)
    begins = [script.end(call) for step in find_steps(script) if step.scope is scope for call in step.backwards]
    begin = max((at for at in begins if at < first), default=None)
    for call in readers(scope):
        if begin is not None and isinstance(call, ast.Call) and begin < script.start(call) < first:
            text = "this clips the gradients of each rank alone, which is probably a mistake; clip behind the call"
            yield Finding(call.lineno, "call", text, False)


def _on_optimizers(wrappers: Wrappers, others: OtherFiles) -> Iterator[Finding]:
    """The optimizers that reduce gradients themselves. Also those of imported files, for a step without a wrapper."""
    script = wrappers.script
    for name, call in reducing_optimizers(script):
        yield Finding(call.lineno, "hand", _text_of_optimizer(name, call, ""))
    steps = [] if wrappers.made else find_steps(script)
    if steps:
        for path, other in others.files_of_two_levels(script, "torch.distributed"):
            for name, call in reducing_optimizers(other):
                yield Finding(steps[0].backwards[0].lineno, "hand", _text_of_optimizer(name, call, path))


def _text_of_optimizer(name: str, call: ast.Call, file: str) -> str:
    where = f" in {file}:{call.lineno}" if file else ""
    return (
        f"the optimizer {name} reduces gradients by itself{where}: leave a loop with this optimizer as it is, because "
        "all_reduce() would send them twice"
    )


def _on_unknown_helpers(script: Script) -> Iterator[Finding]:
    for call in unknown_helpers(script):
        name, owner = called_name(call), ast.unparse(call.func).rpartition(".")[0]
        source = ast.unparse(call.args[0]) if call.args else owner or "module"
        text = f"by its name, {name}() of another file averages gradients by hand: port that file"
        if isinstance(script.parent(call), ast.Expr):
            text += f", or, if it computes the mean over all ranks, write {_FUNCTION}({source}) in its place"
        if "mpi" in f"{script.dotted(call.func)}{name}":
            text += ", after torch.distributed.init_process_group()"
        yield Finding(call.lineno, "hand", text)


def _on_unclear_sums(script: Script) -> Iterator[Finding]:
    for call in unclear_sums(script):
        text = (
            "this seems to be a part of lines that average gradients by hand, in a way that is not understood; if they "
            f"compute the mean over all ranks, write {_FUNCTION}(module) in their place"
        )
        yield Finding(call.lineno, "hand", text)


def _on_class(wrappers: Wrappers) -> Iterator[Finding]:
    script, edits = wrappers.script, [*_class_edits(wrappers)]
    constructors = [call.func for call in wrappers.made]
    for use in wrappers.uses:
        if use not in constructors and not script.is_type(use):
            yield Finding(use.lineno, "class", "the class is used as a value; check what is done with it")
    if edits:
        yield Finding(1, "class", "", False, tuple(edits))
    if edits and not wrappers.made:
        yield Finding(1, "class", "no wrapper is made in this file; port the file that makes it, too")


def _class_edits(wrappers: Wrappers) -> Iterator[Edit]:
    script = wrappers.script
    ours = [(node, alias) for node, alias in script.imported_from if script.is_ddp_import(node, alias)]
    is_taken = bool(script.bound[_OURS])  # then torch's name stays, as that of this class
    renamed = {alias.name for _, alias in ours if not alias.asname and not is_taken}
    for node, alias in ours:
        _refuse_other_meanings(script, alias.asname or alias.name, [alias for _, alias in ours])
        yield from _import_edits(script, node, alias, alias.asname or (alias.name if is_taken else ""))
    full = [use for use in wrappers.uses if isinstance(use, ast.Attribute)]
    if full and is_taken:
        raise UnclearError(full[0].lineno, f"{_OURS} has another meaning in this file; rename one of the two")
    if full and not any(node in script.tree.body and not alias.asname for node, alias in ours):
        yield script.new_import(_IMPORT)
    for use in [*full, *(use for use in wrappers.uses if isinstance(use, ast.Name) and use.id in renamed)]:
        yield script.replacement(use, _OURS)


def _refuse_other_meanings(script: Script, name: str, ours: list[ast.alias]) -> None:
    """Raises UnclearError if the name of the class has another meaning, or is used in an f-string."""
    nodes = [node for _, node in script.bound[name] if node not in ours]
    nodes += [node for node in script.hidden if isinstance(node, ast.Name) and node.id == name]
    if nodes:
        line = min(getattr(node, "lineno", 1) for node in nodes)
        raise UnclearError(
            line, f"{name} has another meaning in this line, or is in an f-string; rename one of the two"
        )


def _import_edits(script: Script, node: ast.ImportFrom, alias: ast.alias, name: str) -> Iterator[Edit]:
    """The edits that import the class of this library, as ``name`` if given, in place of torch's class."""
    if len(node.names) > 1:
        yield script.item_removal(alias)
        line = f"{_IMPORT} as {name}" if name else _IMPORT
        yield script.insertion(node, [line], is_before=False)
        return
    module = re.compile(rf"from\s+({re.escape(node.module or '')})\s").match(script.text, script.start(node))
    if module is None:
        raise UnclearError(node.lineno, f"write {_IMPORT} by hand")
    yield Edit(*module.span(1), "legacy_ddp")
    text = _OURS if alias.asname or not name else f"{_OURS} as {name}"
    yield Edit(script.start(alias), script.start(alias) + len(alias.name), text)


def _on_arguments(wrappers: Wrappers) -> Iterator[Finding]:
    """The arguments of the constructor, and constructors whose result no variable holds."""
    for call in wrappers.made:
        stars = [index for index, argument in enumerate(call.args) if isinstance(argument, ast.Starred)]
        plain: list[ast.expr | ast.keyword] = [*(call.args[: stars[0]] if stars else call.args)]
        found: list[Finding] = []
        for name, node in [*zip(ARGUMENTS, plain, strict=False), *((word.arg, word) for word in call.keywords)]:
            try:
                found += _on_argument(wrappers, call, name, node) if name else ()
            except UnclearError as error:
                found.append(Finding(error.line, "arguments", str(error)))
        yield from found
        yield from _on_lines(wrappers.script, call, found)
        if stars or None in [word.arg for word in call.keywords]:
            text = "arguments in * or ** are not seen here; remove those of torch DDP alone"
            yield Finding(call.lineno, "arguments", text)
    for call in wrappers.unassigned:
        text = "no variable of this file holds the wrapper; call its all_reduce() in each step"
        yield Finding(call.lineno, "call", text)


def _on_lines(script: Script, call: ast.Call, found: list[Finding]) -> Iterator[Finding]:
    """Put a constructor of several lines into one line if only the module is left of its arguments."""
    removed = [edit for finding in found for edit in finding.edits if not edit.text]
    arguments: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    begin, end = script.end(call.func), script.end(call)
    if call.lineno == call.end_lineno or not removed or len(removed) != len(arguments) - 1:
        return
    (left,) = [node for node in arguments if not any(at.start <= script.start(node) < at.end for at in removed)]
    text = script.text[script.start(left) : script.end(left)]
    if "#" not in script.text[begin:end] and not re.search(r"[\r\n]", text):
        yield Finding(call.lineno, "arguments", "", False, (Edit(begin, end, f"({text})"),))


def _on_argument(wrappers: Wrappers, call: ast.Call, name: str, node: ast.expr | ast.keyword) -> Iterator[Finding]:
    script, value = wrappers.script, node.value if isinstance(node, ast.keyword) else node
    if name not in ARGUMENTS:
        yield Finding(call.lineno, "arguments", f"{name} is no argument of torch DDP; find out whose it is")
        return
    reason, is_open = ARGUMENTS[name]
    if reason == _BUFFERS and ast.unparse(value) == "False":
        reason, is_open = (_NO_BUFFERS, True) if name == "broadcast_buffers" else (_NO_FORWARD_SYNC, False)
    elif reason == _BUFFERS and name == "broadcast_buffers" and not isinstance(value, ast.Constant):
        reason, is_open = f"{_BUFFERS}; if it is False, {_FIRST_BUFFERS}", True
    elif reason == _MOVE:
        line = _line_that_moves(wrappers)
        is_open = not line
        reason += f"; line {line} of the script does" if line else "; check that the script does"
    removal = script.item_removal(node)
    is_default = isinstance(value, ast.Constant) and value.value is None
    if reason not in ARGUMENTS:
        text = f"{name} is removed: {reason}" if reason and not is_default else ""
        page = "buffers" if reason.endswith(_FIRST_BUFFERS) else "arguments"
        yield Finding(call.lineno, page, text, is_open and not is_default, (removal,))
    elif node is not value:
        start = script.start(node)
        yield Finding(call.lineno, "arguments", "", False, (Edit(start, start + len(name), reason),))
    elif name != "module":
        yield Finding(call.lineno, "arguments", "", False, (Edit(script.start(node), script.start(node), f"{name}="),))


def _line_that_moves(wrappers: Wrappers) -> int:
    """The line of a call such as ``x.to(device)`` that moves a batch; 0 without one.

    It moves no wrapper, and is in a loop or in another function than the constructor.
    """
    script, homes = wrappers.script, [wrappers.script.scope(call) for call in wrappers.made]
    for call in script.calls:
        name, owner = called_name(call), ast.unparse(call.func).rpartition(".")[0]
        moves = name == "cuda" or (name == "to" and re.search(r"device|cuda|gpu|rank", ast.unparse(call)))
        is_variable = re.fullmatch(r"[\w.\[\]]+(\.pin_memory\(\))?", owner)
        is_wrapped = any(owner in wrapper.names for wrapper in wrappers.all)
        is_elsewhere = script.scope(call) not in homes or any(isinstance(at, LOOPS) for at in script.ancestors(call))
        if is_variable and moves and not is_wrapped and is_elsewhere:
            return call.lineno
    return 0


def _on_steps(wrappers: Wrappers) -> Iterator[Finding]:
    script, steps = wrappers.script, find_steps(wrappers.script)
    for step in steps:
        yield from _on_step(wrappers, step)
    for call in script.calls:
        if re.fullmatch(r"(\w*_)?scaler", called_name(call)) and optimizer_of(script, call):
            text = (
                "this call may run backward() and step(): all_reduce() goes between them, in the function called, "
                "which needs the wrapper for it"
            )
            yield Finding(call.lineno, "call" if wrappers.made else "files", text)
    if len(wrappers.all) > 1:
        text = f"{len(wrappers.all)} wrappers: all ranks make the calls of each step in the same order"
        yield Finding(wrappers.all[0].made[0].lineno, "wrappers", text, False)
    if wrappers.all and not steps:
        made = wrappers.all[0].made[0]
        is_conditional = any(wrappers.is_conditional(wrapper, script.tree.body[-1]) for wrapper in wrappers.all)
        guard = ", behind hasattr(), because the module may be plain" if is_conditional else ""
        text = f"this file has no backward(); call all_reduce() where the training step is{guard}"
        yield Finding(made.lineno, "call", text)


def _on_step(wrappers: Wrappers, step: Step) -> Iterator[Finding]:
    script, line, place = wrappers.script, step.backwards[0].lineno, place_of(wrappers.script, step)
    named = wrappers.of_step(step)
    if not named or place is None:
        what = "which wrapper this backward() is for" if place else "the optimizer step of this backward()"
        where = place.where if place else "between backward() and the step"
        text = f"{what} is not seen here; all_reduce() of the wrapper goes {where}, before unscale_() and clipping"
        if place and place.is_before and _averages_in_each(script):
            text += f"; torch DDP averages in each backward() here, for its bits write it after line {line} instead"
        yield Finding(line, "call" if wrappers.made else "files", text)
        return
    lines = []
    for name, wrapper in named:
        if wrappers.is_conditional(wrapper, place.statement):
            lines += [f'if hasattr({name}, "all_reduce"):', f"{script.indentation}{name}.all_reduce()"]
            text = f"all_reduce() stands behind hasattr(), because {name} is wrapped under a condition and may be plain"
            yield Finding(line, "call", text, False)
        else:
            lines.append(f"{name}.all_reduce()")
    before_others = earlier(script, step.backwards)
    is_one = len(named) == 1 and len(before_others) > 0
    each = statements_of_one_block(script, step.backwards, place.statement) if is_one else []
    try:
        edits = [script.insertion(at, lines, is_before=place.is_before) for at in each or [place.statement]]
    except UnclearError as error:
        yield Finding(error.line, "call", str(error))
        return
    yield Finding(line, "call", "", False, tuple(edits))
    yield from _on_place(script, step, place, edits[0].start)
    yield from _on_clipping(script, step)
    if each:
        text = (
            "all_reduce() stands after each backward(), because torch DDP averages in each; "
            "one call after the last sends less, and rounds differently"
        )
        yield Finding(line, "backwards", text, False)
    elif before_others:
        calls = " and ".join(f"{name}.all_reduce()" for name, _ in named)
        ends = " and ".join(f"line {end}" for end in sorted({call.end_lineno or 0 for call in before_others}))
        text = (
            "one all_reduce() for several backward(); torch DDP averages in each, which rounds differently; "
            f"for its bits add {calls} after {ends}, too"
        )
        yield Finding(line, "backwards", text)


def _on_place(script: Script, step: Step, place: Place, at: int) -> Iterator[Finding]:
    first = step.backwards[0]
    if place.is_before:
        text = "all_reduce() stands under the condition of the step: other micro-batches send nothing"
        if _averages_in_each(script):
            text += "; torch DDP averages in each backward() here, for its bits call after each"
        yield Finding(first.lineno, "accumulation", text, False)
    if place.is_rare:
        text = "all_reduce() follows each backward(), but the step has a condition; to accumulate, move the call there"
        yield Finding(first.lineno, "accumulation", text)
    for reader in readers(step.scope):
        if script.end(first) < script.start(reader) < at:
            text = "this reads the gradients of this rank alone: all_reduce() comes later"
            yield Finding(reader.lineno, "call", text)
    for call in step.backwards:
        if any(word.arg == "create_graph" for word in call.keywords):
            yield Finding(call.lineno, "autograd", "with create_graph=True all_reduce() refuses the gradients")


def _averages_in_each(script: Script) -> bool:
    """Whether torch DDP averages in the backward of every micro-batch, as far as the text tells."""
    return not script.has_attribute("no_sync", "require_backward_grad_sync")


def _on_clipping(script: Script, step: Step) -> Iterator[Finding]:
    calls = [node for node in readers(step.scope) if isinstance(node, ast.Call)]
    is_scaled = any(".scale(" in ast.unparse(call) for call in step.backwards)
    if is_scaled and "unscale_" not in [*map(called_name, calls)]:
        for call in calls:
            if script.end(step.backwards[0]) < script.start(call) < script.start(step.steps[0]):
                text = (
                    "the script clips scaled gradients, which is probably a mistake; this stays, for equal bits; the "
                    "right order is all_reduce(), unscale_(optimizer), clipping, step(optimizer)"
                )
                yield Finding(call.lineno, "call", text, False)


def _on_settings(wrappers: Wrappers) -> Iterator[Finding]:
    script, steps = wrappers.script, find_steps(wrappers.script)
    places = [place_of(script, step) for step in steps if wrappers.of_step(step)]
    for node in script.nodes:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "attr", "") == "require_backward_grad_sync":
            around = [*script.ancestors(node)]
            # The call stands behind the loop of micro-batches, or under the condition of the optimizer step.
            is_once = any(place and (place.is_before or place.statement in around) for place in places)
            text = "require_backward_grad_sync is removed: only all_reduce() sends" + (
                ", once per optimizer step" if is_once else "; check that it runs once per step"
            )
            yield Finding(node.lineno, "accumulation", text, not is_once, (script.statement_removal(node),))


def _on_batch_norm(wrappers: Wrappers) -> Iterator[Finding]:
    script = wrappers.script
    for node in script.nodes:
        if re.fullmatch(r"torch\.nn\.(\w+\.)*(Lazy)?BatchNorm\dd", script.dotted(node)):
            text = (
                "the statistics of BatchNorm are of each rank's own data here; torch DDP sends those of rank 0 in "
                "every forward, but not with broadcast_buffers=False"
            )
            yield Finding(node.lineno, "evaluation", text, False)
            return


def _on_evaluation(wrappers: Wrappers) -> Iterator[Finding]:
    """The calls of ``eval()`` on a wrapper: BatchNorm then uses statistics that differ between ranks."""
    # With broadcast_buffers=False for every wrapper they differ under torch DDP, too.
    words = [word for call in wrappers.made for word in call.keywords if word.arg == "broadcast_buffers"]
    if wrappers.made and sum(ast.unparse(word.value) == "False" for word in words) == len(wrappers.made):
        return
    for call in wrappers.script.calls:
        name = wrappers.name_at(call) if called_name(call) == "eval" else ""
        if name and _is_of_one_rank(wrappers.script, call):
            yield Finding(call.lineno, "evaluation", "one rank alone evaluates: this needs nothing", False)
        elif name:
            text = (
                f"if the model has BatchNorm and all ranks evaluate, call {name}.broadcast_buffers() on every rank "
                "before; an evaluation on one rank needs nothing"
            )
            yield Finding(call.lineno, "evaluation", text)


def _on_statistics(wrappers: Wrappers) -> Iterator[Finding]:
    """Uses of the statistics of BatchNorm, and settings of a wrapper that another file makes."""
    for call in wrappers.script.calls:
        if called_name(call) == "distribute_bn":
            text = (
                "torch DDP begins each step with the statistics of rank 0, unless broadcast_buffers=False; for its "
                "bits here, call broadcast_buffers() of the wrapper before the first micro-batch of each step"
            )
            yield Finding(call.lineno, "statistics", text)
        words = [word for word in call.keywords if word.arg == "broadcast_buffers"]
        if words and call not in wrappers.made:
            text = (
                f"{called_name(call)}() may pass this to the wrapper, which does not take broadcast_buffers: {_BUFFERS}"
            )
            yield Finding(words[0].value.lineno, "buffers", text)
        if called_name(call) == "eval" and not wrappers.made and find_steps(wrappers.script) and not call.args:
            text = (
                "if this is the wrapper, it has BatchNorm, and all ranks evaluate, call its broadcast_buffers() on "
                "every rank before"
            )
            yield Finding(call.lineno, "evaluation", text)


def _is_of_one_rank(script: Script, call: ast.Call) -> bool:
    """Whether a call, or each call of its function, is under a condition such as ``if rank == 0:``."""
    calls = script.calls_of(script.scope(call))
    return _is_under_rank(script, call) or (bool(calls) and all(_is_under_rank(script, at) for at in calls))


def _is_under_rank(script: Script, node: ast.AST) -> bool:
    around = [(block, script.parent(block[0])) for block, _ in script.path(node)]
    tests = [ast.unparse(at.test) for block, at in around if isinstance(at, ast.If) and block is at.body]
    return any(_ONE_RANK.search(test) for test in tests)


def _on_names(wrappers: Wrappers) -> Iterator[Finding]:
    """Names of the table, samplers without ``set_epoch()``, and texts with the name of torch's class."""
    sets_epoch = any(called_name(call) == "set_epoch" for call in wrappers.script.calls)
    for node in wrappers.script.nodes:
        name = wrappers.script.dotted(node) or (f".{node.attr}" if isinstance(node, ast.Attribute) else "")
        if isinstance(getattr(node, "ctx", None), ast.Load):
            for pattern, is_open, page, text in _NAMES:
                if re.fullmatch(pattern, name):
                    yield Finding(node.lineno, page, text, is_open)
        if isinstance(node, ast.Call) and called_name(node) == "DistributedSampler" and not sets_epoch:
            text = "without sampler.set_epoch(epoch) every epoch has the same order, as under torch DDP"
            yield Finding(node.lineno, "sampler", text, False)
        if isinstance(node, ast.Constant) and node.value == "DistributedDataParallel":
            yield Finding(node.lineno, "class", "this text names torch's class; check what is done with it")
