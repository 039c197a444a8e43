"""What a DesyncError says besides the difference: the wrapper, open no_sync() blocks, and the closure of a step."""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import LBFGS, SGD, Optimizer

from legacy_ddp import Checks, LegacyDistributedDataParallel, all_reduce_gradients
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import run_cases
from tests.helpers.small_models import Said, error_of

Model = LegacyDistributedDataParallel
_MET = "ranks bring uneven work:\n  micro-batches since the last call: rank 1 has 2; rank 0 has 1"
_MEAN_LOSS = "the closure must return the mean loss, equal on all ranks"


class Generator(nn.Linear):
    """A module whose class is known by name."""


class Critic(nn.Linear):
    """Another one."""


def _wrap(kind: type[nn.Linear], **options: Any) -> Model:
    return Model(kind(2, 1), checks=Checks(uneven="raise", divergence="ignore", same_data="allow"), **options)


def _backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


def _weighted_on_rank_1(rank: int) -> Said:
    _, critic = _wrap(Generator), _wrap(Critic)
    _backward(critic)
    return error_of(critic.all_reduce, sample_size=rank or None)


def _other_operation_on_rank_1(rank: int) -> Said:
    _, critic = _wrap(Generator), _wrap(Critic)
    return error_of(critic.broadcast_parameters if rank else critic.all_reduce)


def _function_beside_a_wrapper(rank: int) -> Said:
    _, plain = _wrap(Generator), Critic(2, 1)
    all_reduce_gradients(plain)
    return error_of(all_reduce_gradients, plain, sample_size=rank or None)


def _other_wrappers(rank: int) -> Said:
    generator, critic = _wrap(Generator), _wrap(Critic)
    return error_of((critic if rank else generator).all_reduce)


def _one_left(rank: int) -> Said:
    critic, generator = _wrap(Critic), weakref.ref(_wrap(Generator))
    assert generator() is None
    return error_of(critic.all_reduce, sample_size=rank or None)


def _idle_calls_on_rank_1(rank: int) -> Said:
    model = _wrap(Critic)
    for is_last in (False, True):
        if rank and not is_last:
            with model.no_sync():
                _backward(model)
                model.all_reduce()
        elif is_last:
            _backward(model)
    return error_of(model.all_reduce)


def _block_of_another_wrapper_on_rank_1(rank: int) -> Said:
    generator, critic = _wrap(Generator), _wrap(Critic)
    if rank:
        with generator.no_sync():
            return error_of(critic.all_reduce, sample_size=1)
    return error_of(critic.all_reduce)


def _same_blocks(rank: int) -> Said:
    generator, critic = _wrap(Generator), _wrap(Critic)
    with critic.no_sync():
        critic.all_reduce()
    with generator.no_sync():
        return error_of(critic.all_reduce, sample_size=rank or None)


_CASES: dict[str, tuple[Callable[[int], Said], str, str]] = {
    "weighted on rank 1": (_weighted_on_rank_1, "all_reduce() call 1 of wrapper 2 (Critic): plain and weighted", ""),
    "another operation": (_other_operation_on_rank_1, "Ranks met in different calls of wrapper 2 (Critic):\n", ""),
    "a function": (_function_beside_a_wrapper, "all_reduce() call 2 of wrapper 2 (Critic): plain and weighted", ""),
    "other wrappers": (
        _other_wrappers,
        "all_reduce() call 1: ranks met in different calls:\n  wrapper: rank 1 has Critic; rank 0 has Generator\n",
        "",
    ),
    "one is left": (_one_left, "all_reduce() call 1: plain and weighted calls met:\n", ""),
    "calls in no_sync()": (
        _idle_calls_on_rank_1,
        f"all_reduce() call 1: {_MET}",
        "  calls inside no_sync() of Critic: rank 1 has 1, which did nothing; rank 0 has\n    nothing",
    ),
    "a block is open": (
        _block_of_another_wrapper_on_rank_1,
        "all_reduce() call 1 of wrapper 2 (Critic): plain and weighted calls met:\n",
        "  no_sync() of Generator: rank 1 has an open block; rank 0 has nothing",
    ),
    "the same blocks": (_same_blocks, "all_reduce() call 1 of wrapper 2 (Critic): plain and weighted", ""),
}


def test_a_desync_error_names_the_wrapper_of_several_and_what_differs_in_no_sync() -> None:
    found = run_cases(_run, 2, {name: (name,) for name in _CASES})

    for name, (_, head, note) in _CASES.items():
        first, second = found[name]
        assert first == second, name  # an agreed error
        assert first is not None
        assert first[0] == "DesyncError"
        assert first[1].startswith(head.replace("wrapper 2", _wrapper_of(first[1]))), first[1]
        assert first[1].endswith(note)
        assert ("no_sync()" in first[1]) == bool(note), name


def _wrapper_of(text: str) -> str:
    """The wrapper that a text names: cases share a group, and the number of a wrapper counts all of the group."""
    number = text.partition(" of wrapper ")[2].partition(" ")[0]
    return f"wrapper {number}"


def _run(rank: int, name: str) -> Said:
    return _CASES[name][0](rank)


def _adds(module: nn.Module) -> None:
    module.add_module("adapter", nn.Linear(1, 1))


def _adds_and_removes(module: nn.Module) -> None:
    _adds(module)
    module.bias = None


def _freezes(module: nn.Module) -> None:
    module.bias.requires_grad_(False)


_SIGNS = "  parameter 'adapter.bias': rank 1 has nothing; rank 0 has float32 (1,) on "
_ADDED = "only rank 0 has parameter 'adapter.bias', parameter 'adapter.weight', added after "
_CHANGES: dict[str, tuple[Callable[[nn.Module], None], int, str]] = {
    "added": (_adds, 0, f"{_ADDED}construction "),
    "added later": (_adds, 2, f"{_ADDED}all_reduce() call 2 "),
    "added and removed": (
        _adds_and_removes,
        0,
        f"{_ADDED}construction only rank 0 lacks parameter 'bias', removed after construction ",
    ),
    "frozen": (_freezes, 1, ""),
}


def _changed_on_rank_0(rank: int, name: str, by_function: bool) -> Said:
    change, calls, _ = _CHANGES[name]
    module = Critic(2, 1) if by_function else _wrap(Critic)
    call = partial(all_reduce_gradients, module) if by_function else module.all_reduce
    for _ in range(calls):
        _backward(module)
        call()
    if rank == 0:
        change(module if by_function else module.module)
    return error_of(call)


def test_what_one_rank_has_added_or_removed_is_called_that() -> None:
    cases = {
        f"{name}, {how}": (name, how) for name in _CHANGES for how in (False, True) if _CHANGES[name][1] or not how
    }

    for case, (first, second) in run_cases(_changed_on_rank_0, 2, cases).items():
        assert first == second, case
        assert first is not None
        assert first[0] == "LayoutError"
        lines, told = first[1].splitlines(), _CHANGES[cases[case][0]][2]
        assert f" {told}make the module and the settings alike" in " ".join(first[1].split())
        assert first[1].count("only rank") == told.count("only rank")
        assert any(line.startswith(_SIGNS) for line in lines) is ("added" in case)
        assert lines[-1] == "make the module and the settings alike on every rank"


class _LineSearch(Optimizer):
    """Runs the closure until the loss is small: more often on a rank with a greater loss."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Callable[[], torch.Tensor]) -> None:  # type: ignore[override]
        for _ in range(3):
            if closure() < 1.5:
                return


_OPTIMIZERS: dict[str, tuple[Callable[[Any], Optimizer], bool]] = {
    "LBFGS": (lambda parameters: LBFGS(parameters, max_iter=2), True),
    "line search": (_LineSearch, True),
    "SGD": (lambda parameters: SGD(parameters, lr=0.1), False),
}


def _in_closure(rank: int, name: str) -> Said:
    """The ranks disagree inside of a closure."""
    model = _wrap(Critic)
    optimizer = _OPTIMIZERS[name][0](model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        model.all_reduce(sample_size=rank or None)
        return loss

    return error_of(optimizer.step, closure)


def test_a_call_in_a_closure_that_the_loss_asks_for_says_to_return_the_mean_loss() -> None:
    for name, said in run_cases(_in_closure, 2, {name: (name,) for name in _OPTIMIZERS}).items():
        assert said[0] == said[1]
        assert said[0] is not None
        assert said[0][0] == "DesyncError"
        text, (make, is_told) = " ".join(said[0][1].split()), _OPTIMIZERS[name]
        owner = type(make([torch.zeros(1, requires_grad=True)])).__name__
        assert (f"ranks 0-1 made the call in the closure of {owner}.step()" in text) is is_told, name
        assert (_MEAN_LOSS in text) is is_told


def _inside_no_sync_while_rank_0_waits(rank: int) -> Said:
    generator, critic = _wrap(Generator, timeout_seconds=2.0), _wrap(Critic)
    store = dist.distributed_c10d._get_default_store()
    if rank:
        with critic.no_sync():
            critic.all_reduce()
            store.wait(["told"])
        return None
    said = error_of(generator.all_reduce)
    store.set("told", "by rank 0")
    return said


def test_a_report_names_the_wrapper_of_the_call_and_the_open_block_of_the_missing_rank() -> None:
    said = run_ranks(_inside_no_sync_while_rank_0_waits, 2)[0]

    assert said is not None
    assert said[0] == "SyncTimeoutError"
    text = " ".join(said[1].split())
    assert text.startswith("all_reduce() call 1 of wrapper 1 (Generator), phase agree: no answer within 2 s; missing")
    assert "missing rank 1 (user code after broadcast_buffers() call 1 of wrapper 2 (Critic)" in text
    assert (
        "; no_sync() of Critic: an open block, calls inside no_sync() of Critic: 1, which did nothing, on host" in text
    )
