"""A fault of a single rank is named on all ranks without harm; the same action on all ranks is allowed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, LegacyDDPError, LegacyDistributedDataParallel
from tests.helpers.outcomes import (
    Outcome,
    attempt,
    backward,
    bits,
    check_agreed,
    check_silent,
    next_call_is_right,
    outcome_of,
    same,
    small_net,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, once, run_cases

# Faults make uneven work, too; its warning has tests of its own.
Model = partial(LegacyDistributedDataParallel, checks=Checks(uneven="allow", divergence="ignore"))


@dataclass
class Scene:
    """One rank's part in a step."""

    model: LegacyDistributedDataParallel
    optimizer: torch.optim.Optimizer
    rank: int
    deviates: bool  # whether this rank does what the fault is called after


Action = Callable[[], object]


@dataclass(frozen=True)
class Fault:
    """``lead_up``: what a rank does before the call that is to be tried, which it returns.

    ``by_majority``: the header shows a difference and no fact, so that of two ranks nobody can be blamed.
    ``mend``: what makes the deviating rank alike again. ``words``: of the text, with the rank's number for ``{}``.
    """

    lead_up: Callable[[Scene], Action]
    error: str
    words: tuple[str, ...]
    by_majority: bool = True
    mend: Callable[[Scene], object] | None = None
    checks: dict[str, str] = field(default_factory=dict)


def _skips_a_call(scene: Scene) -> Action:
    backward(scene.model, 1.0 + scene.rank)
    if scene.deviates:
        scene.optimizer.step()
        scene.optimizer.zero_grad()
        backward(scene.model, 1.0 + scene.rank)
    return scene.model.all_reduce


def _calls_once_more(scene: Scene, clear: bool, sample_size: int | None = None) -> Action:
    backward(scene.model, 1.0 + scene.rank)
    scene.model.all_reduce(sample_size)
    scene.optimizer.step()
    if not scene.deviates:
        scene.optimizer.zero_grad(set_to_none=clear)
        backward(scene.model, 2.0)
    return partial(scene.model.all_reduce, sample_size)


def _brings_a_micro_batch_less(scene: Scene) -> Action:
    for _ in range(1 if scene.deviates else 2):
        backward(scene.model, 1.0)
    return scene.model.all_reduce


Call = Callable[[LegacyDistributedDataParallel], Action]


def _calls(scene: Scene, deviating: Call, usual: Call = lambda model: model.all_reduce) -> Action:
    backward(scene.model, 1.0)
    return (deviating if scene.deviates else usual)(scene.model)


def _with(*sample_size: int, **skip: bool) -> Call:
    return lambda model: partial(model.all_reduce, *sample_size, **skip)


def _changes(scene: Scene, change: Callable[[LegacyDistributedDataParallel], object]) -> Action:
    backward(scene.model, 1.0)
    if scene.deviates:
        change(scene.model)
    return scene.model.all_reduce


def _as_at_first(scene: Scene) -> None:
    """Undo any change of the model."""
    module = scene.model.module
    module[0].bias.requires_grad_(False)
    module[1].bias.requires_grad_(True)
    module.float()


def _changed_model(change: Callable[[LegacyDistributedDataParallel], object], *words: str) -> Fault:
    return Fault(partial(_changes, change=change), "LayoutError", words, mend=_as_at_first)


_EXTRA = ("all_reduce() call 2", "rank {}", "an extra call")
_FAULTS = {
    "skips a call": Fault(
        _skips_a_call,
        "DesyncError",
        ("rank {}: weights changed", "a skipped call", "micro-batches since the last call: "),
        by_majority=False,
        checks={"unsynchronized_step": "allow"},
    ),
    "calls once more": Fault(partial(_calls_once_more, clear=True), "DesyncError", _EXTRA, by_majority=False),
    "calls once more, zeroed": Fault(partial(_calls_once_more, clear=False), "DesyncError", _EXTRA, by_majority=False),
    "brings a micro-batch less": Fault(
        _brings_a_micro_batch_less,
        "DesyncError",
        ("micro-batches since the last call: ", "rank {} has 1", " 2"),
        mend=lambda scene: backward(scene.model, 1.0),
        checks={"uneven": "raise"},
    ),
    "makes another call": Fault(
        partial(_calls, deviating=lambda model: model.broadcast_buffers),
        "DesyncError",
        ("rank {} has broadcast_buffers() call 2", "all_reduce() call 1"),
    ),
    "passes a sample_size": Fault(
        partial(_calls, deviating=_with(5)), "DesyncError", ("rank {} has an int sample_size", "every rank or on none")
    ),
    "freezes": _changed_model(
        lambda model: model.module[1].bias.requires_grad_(False),
        "parameter '1.bias': rank {} has float32 (2,) on ",
        ", frozen",
    ),
    "unfreezes": _changed_model(
        lambda model: model.module[0].bias.requires_grad_(True),
        "parameter '0.bias': rank {} has float32 (3,) on ",
        ", trainable",
    ),
    "casts": _changed_model(nn.Module.double, "parameter '1.weight': ", "rank {} has float64"),
}


def _has_gradients_with_a_graph(scene: Scene) -> Action:
    backward(scene.model, 1.0)
    if scene.deviates:
        scene.model.module[1].bias.grad.requires_grad_()
    return scene.model.all_reduce


# What fails on the rank itself, before the header: error there, and the words that follow it.
_OWN_MISTAKES = {
    "has gradients with a graph": (
        _has_gradients_with_a_graph,
        "GradientError",
        ("grad of '1.bias' requires grad", "detach it"),
    ),
    "passes nonsense": (
        partial(_calls, deviating=_with(-1), usual=_with(1)),
        "ValueError",
        ("sample_size is out of range: got -1",),
    ),
    "divides twice": (partial(_calls_once_more, clear=True, sample_size=4), "GradientError", ("a second time",)),
}


_TABLES = {
    "faults": _FAULTS,
    "mistakes": {name: Fault(lead_up, own, words) for name, (lead_up, own, words) in _OWN_MISTAKES.items()},
}


def _play(rank: int, table: str, name: str, deviating: tuple[int, ...]) -> Outcome:
    fault, net = _TABLES[table][name], small_net()
    net[0].bias.requires_grad_(False)
    model = LegacyDistributedDataParallel(
        net, checks=Checks(**{"uneven": "allow", "divergence": "ignore", **fault.checks})
    )
    scene = Scene(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, rank in deviating)
    action = fault.lead_up(scene)
    return outcome_of(model, rank, action, partial(fault.mend, scene) if fault.mend and scene.deviates else bool)


@once
def _seen(table: str, world_size: int, *who: int) -> dict[str, list[Outcome]]:
    """What ranks see of each fault of a table, in one job."""
    return run_cases(_play, world_size, {name: (table, name, who) for name in _TABLES[table]})


@pytest.mark.parametrize("world_size, who", [(2, 1), (3, 0)])
@pytest.mark.parametrize("name", _FAULTS)
def test_what_one_rank_does_alone_is_named_on_all(name: str, world_size: int, who: int) -> None:
    fault = _FAULTS[name]
    blamed = () if fault.by_majority and world_size == 2 else (who,)
    words = [word.format(who) for word in fault.words]
    check_agreed(_seen("faults", world_size, who)[name], fault.error, blamed, *words)


@pytest.mark.parametrize("name", ["skips a call", "calls once more"])
def test_evidence_against_two_of_three_ranks_outranks_the_count(name: str) -> None:
    said = _FAULTS[name].words[-1 if name == "calls once more" else 1]
    check_agreed(_seen("faults", 3, 0, 1)[name], "DesyncError", (0, 1), "ranks 0-1", said)


@pytest.mark.parametrize("name", _FAULTS)
def test_what_all_ranks_do_is_how_they_train(name: str) -> None:
    check_silent(_seen("faults", 3, 0, 1, 2)[name])


@pytest.mark.parametrize("world_size, who", [(2, 1), (3, 0)])
@pytest.mark.parametrize("name", _OWN_MISTAKES)
def test_a_mistake_of_one_rank_is_the_same_error_on_all(name: str, world_size: int, who: int) -> None:
    _, own, words = _OWN_MISTAKES[name]
    check_agreed(_seen("mistakes", world_size, who)[name], "PeerError", (who,), f"rank {who}: {own}: ", *words)


@pytest.mark.parametrize("name", _OWN_MISTAKES)
def test_the_same_mistake_on_every_rank_is_the_rank_s_own_error(name: str) -> None:
    _, own, words = _OWN_MISTAKES[name]
    check_agreed(_seen("mistakes", 2, 0, 1)[name], own, (), *words)


def _detaches_gradients_with_a_graph(scene: Scene) -> Action:
    action = _has_gradients_with_a_graph(scene)
    scene.model.module[1].bias.grad.detach_()
    return action


def _evaluates(scene: Scene) -> Action:
    backward(scene.model, 1.0)
    if scene.deviates:
        scene.model.eval()
        with torch.no_grad():
            scene.model(torch.ones(1, 2))
        scene.model.train()
    return scene.model.all_reduce


def _steps_another_model(scene: Scene) -> Action:
    backward(scene.model, 1.0)
    if scene.deviates:
        other = small_net()
        backward(other, 1.0)
        torch.optim.SGD(other.parameters(), lr=0.1).step()
    return scene.model.all_reduce


def _writes_its_weights(scene: Scene) -> Action:
    backward(scene.model, 1.0)
    if scene.deviates:
        with torch.no_grad():
            for parameter in scene.model.parameters():
                parameter.mul_(1.0)
    backward(scene.model, 1.0)
    return scene.model.all_reduce


_FREEDOMS: dict[str, Callable[[Scene], Action]] = {
    "detaches_gradients_with_a_graph": _detaches_gradients_with_a_graph,
    "has_no_samples": partial(_calls, deviating=_with(0), usual=_with(4)),
    "sits_out": partial(_calls, deviating=_with(skip=True)),
    "evaluates": _evaluates,
    "steps_another_model": _steps_another_model,
    "brings_a_micro_batch_less": _brings_a_micro_batch_less,
    "writes_its_weights": _writes_its_weights,
}
_TABLES["freedoms"] = {name: Fault(lead_up, "", ()) for name, lead_up in _FREEDOMS.items()}


@pytest.mark.parametrize("name", _FREEDOMS)
def test_what_a_rank_may_do_alone_is_silent(name: str) -> None:
    check_silent(_seen("freedoms", 3, 0)[name])


# The last call repeats the one before on every rank: allowed, too.
@on_ranks(2, [3, 3])
def test_local_steps_between_calls_on_every_rank_are_no_skipped_call(rank: int) -> int:
    model = Model(small_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backward(model, 1.0 + rank)
        if step % 3 == 2:
            model.all_reduce()
        with model.no_sync():
            optimizer.step()
    return model.all_reduce().call


def _no_batch(rank: int, clear: bool) -> tuple[list[float], int]:
    model = Model(small_net())
    for step in range(2):
        model.zero_grad(set_to_none=clear)
        if rank == 0 or step == 0:
            backward(model, 1.0)
        record = model.all_reduce()
    return model.module[1].bias.grad.tolist(), record.call


def test_a_rank_without_a_batch_is_no_rank_that_calls_twice() -> None:
    seen = run_cases(_no_batch, 2, {"cleared": (True,), "zeroed": (False,)})
    assert seen == dict.fromkeys(seen, [([0.5, 0.5], 2)] * 2)


@on_ranks(3, [([1.0, 1.0], (2,))] * 3)
def test_a_repeated_call_of_all_ranks_that_take_part_is_no_extra_call(rank: int) -> tuple[list[float], tuple[int, ...]]:
    model = Model(small_net())
    for _ in range(2):
        if model.module[1].bias.grad is None:
            backward(model, 1.0)
        record = model.all_reduce(skip=rank == 2)
    return model.module[1].bias.grad.tolist(), record.skipped_ranks


def _other_wrapper(rank: int) -> list[Outcome]:
    models = [Model(small_net()), Model(small_net())]
    for model in models:
        backward(model, 1.0)
    before = bits(models[rank % 2])
    error = attempt(models[rank % 2].all_reduce)
    assert isinstance(error, LegacyDDPError)
    untouched = same(before, bits(models[rank % 2]))
    return [
        Outcome(type(error).__name__, error.ranks, str(error), untouched, next_call_is_right(model, rank))
        for model in models
    ]


def test_another_wrapper_on_one_rank_is_named_on_all_and_both_go_on() -> None:
    outcomes = run_ranks(_other_wrapper, 3)  # wrappers are numbered on their group
    for model in range(2):
        said = "rank 1 has wrapper 2 (Sequential); "
        check_agreed([outcome[model] for outcome in outcomes], "DesyncError", (1,), said)


@on_ranks(2)
def _passes_nonsense_of_its_own(rank: int) -> Outcome:
    model = Model(small_net())
    backward(model, 1.0)
    return outcome_of(model, rank, partial(model.all_reduce, -1 - rank))


def test_different_mistakes_on_all_ranks_are_one_error_that_lists_them() -> None:
    mistake = "ValueError: sample_size is out of range: got -{}"
    said = [f"rank {rank}: {mistake.format(rank + 1)}" for rank in range(2)]
    check_agreed(_passes_nonsense_of_its_own(), "PeerError", (0, 1), *said)


def _synchronise(model: Model) -> None:
    model.all_reduce()


def _turns_through_a_helper(rank: int) -> Outcome:
    first, second = Model(small_net()), Model(small_net())
    for model in (first, second):
        backward(model, 1.0)
    calls = (
        lambda: _synchronise(first),  # a line of its own
        lambda: _synchronise(second),
    )
    error = attempt(calls[rank == 2])
    assert isinstance(error, LegacyDDPError)
    return Outcome(type(error).__name__, error.ranks, str(error), True, next_call_is_right(first, rank))


def test_calls_through_one_helper_function_are_named_by_the_lines_that_lead_there() -> None:
    """No line was named: only the line in the helper function was compared."""
    first = _turns_through_a_helper.__code__.co_firstlineno
    file = "test_header_faults.py"
    lines = f"line: rank 2 has {file}:{first + 6} in <lambda>; ranks 0-1 have {file}:{first + 5} in <lambda>"
    check_agreed(run_ranks(_turns_through_a_helper, 3), "DesyncError", (2,), f"\n  {lines}\n")
