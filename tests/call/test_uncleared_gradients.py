"""Backward passes that add to the result of a call: zero_grad() is missing, for all gradients or for some."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.profiler import ProfilerActivity, profile

from legacy_ddp import LegacyDistributedDataParallel, all_reduce_gradients
from tests.helpers import logged_warnings
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.small_models import Said, add_gradients, error_of, gradient_values

Model = LegacyDistributedDataParallel
Between = Callable[[Model], object]


def _each(act: Callable[[Any], object]) -> Between:
    return lambda model: [act(parameter) for parameter in model.parameters()]


def _sgd(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _clip(model: Model) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def _then(*acts: Between) -> Between:
    return lambda model: [act(model) for act in acts]


def _step(model: Model) -> None:
    _sgd(model).step()


CLEARS: dict[str, Between] = {
    "zero_grad()": Model.zero_grad,
    "zero_grad(set_to_none=False)": partial(Model.zero_grad, set_to_none=False),
    "zero_grad() of the optimizer": lambda model: _sgd(model).zero_grad(),
    "in place, of the optimizer": lambda model: _sgd(model).zero_grad(set_to_none=False),
    "None": _each(lambda parameter: setattr(parameter, "grad", None)),
    "another tensor": _each(lambda parameter: setattr(parameter, "grad", torch.zeros_like(parameter))),
    "zero_()": _each(lambda parameter: parameter.grad.zero_()),
    "detach_().zero_()": _each(lambda parameter: parameter.grad.detach_().zero_()),
    "data.zero_()": _each(lambda parameter: parameter.grad.data.zero_()),
    "_foreach_zero_": lambda model: torch._foreach_zero_([p.grad for p in model.parameters()]),
    "times 0": _each(lambda parameter: parameter.grad.mul_(0)),
    "clip, step, zero_()": _then(_clip, _step, partial(Model.zero_grad, set_to_none=False)),
}
FORGETS: dict[str, Between] = {
    "nothing": id,
    "step": _step,
    "clip": _clip,
    "clip, step": _then(_clip, _step),
    "one of two zeroed": lambda model: next(model.parameters()).grad.zero_(),  # type: ignore[union-attr]
    "one of two None": lambda model: setattr(next(model.parameters()), "grad", None),
    "step, one of two zeroed": _then(_step, lambda model: model.module.bias.grad.zero_()),  # type: ignore[operator, union-attr]
    "assigned to itself": _each(lambda parameter: setattr(parameter, "grad", parameter.grad)),
}


def _hooked(**arguments: Any) -> Model:
    model = Model(nn.Linear(2, 1), **arguments)
    model.register_comm_hook(None, allreduce_hook)
    return model


WRAPPERS: dict[str, Callable[[], Model]] = {
    "small": lambda: Model(nn.Linear(2, 1)),
    "large": lambda: Model(nn.Linear(2**15, 2)),  # moves to its slot in backward
    "without views": lambda: Model(nn.Linear(2, 1), gradient_as_bucket_view=False),
    "gloo": lambda: Model(nn.Linear(2, 1), transport="gloo"),
    "reproducible": lambda: Model(nn.Linear(2, 1), reproducible=True),
    "hook": _hooked,
}
# Without views nothing tells a clipped result from a cleared result, and .data.zero_() from nothing. On a device it is
# no better with _foreach_zero_, so nothing is told there.
UNKNOWN = {("without views", act) for act in ("clip", "clip, step", "data.zero_()")}


def _two_steps(rank: int, make: Callable[[], Model], between: Between) -> tuple[Said, bool, dict[str, float | None]]:
    """The error of the second call, whether it left every gradient as it was, and the gradients of a mended step."""
    model = make()
    add_gradients(model, rank + 1.0)
    model.all_reduce(sample_size=1)
    between(model)
    add_gradients(model, rank + 1.0)
    before = gradient_values(model)
    said = error_of(model.all_reduce, sample_size=1)
    is_untouched = gradient_values(model) == before
    if said is not None:
        model.zero_grad()
        add_gradients(model, rank + 1.0)
        model.all_reduce(sample_size=1)
    return said, is_untouched, gradient_values(model)


def _is_unknown(wrapper: str, act: str) -> bool:
    is_on_cpu = torch.get_default_device().type == "cpu"
    return (wrapper, act) in UNKNOWN or (wrapper == "without views" and act in FORGETS and not is_on_cpu)


def _table(rank: int, acts: str) -> dict[tuple[str, str], Any]:
    table = {"clears": CLEARS, "forgets": FORGETS}[acts]
    return {
        (wrapper, act): _two_steps(rank, make, between)
        for wrapper, make in WRAPPERS.items()
        for act, between in table.items()
        if not _is_unknown(wrapper, act)
    }


def test_a_result_with_a_backward_added_is_not_divided_again() -> None:
    for found in run_ranks(_table, 2, "forgets"):
        assert {wrapper for wrapper, _ in found} >= {*WRAPPERS} - {"without views"}
        for case, (said, is_untouched, mended) in found.items():
            assert said is not None, case
            kind, text = said
            assert kind == "GradientError", (case, said)
            assert "holds the result of an earlier call, and a backward was added to it" in text
            assert "sample_size would divide that result again in all_reduce() call 2" in text
            assert "call model.zero_grad()" in text
            assert "no_sync()" in text
            assert is_untouched, case
            assert set(mended.values()) == {1.5}, case


def test_a_result_that_was_cleared_in_any_way_is_no_second_division() -> None:
    for found in run_ranks(_table, 2, "clears"):
        assert len(found) == len(WRAPPERS) * len(CLEARS) - 1
        for case, (said, _, reduced) in found.items():
            assert said is None, (case, said)
            assert set(reduced.values()) == {1.5}, case


SIZES = [  # sample_size of two calls, the error of the second, and the gradients of both ranks
    ((None, 2), "GradientError", (2.5, 3.5)),
    ((2, 2), "GradientError", (1.75, 2.75)),
    ((None, None), None, (3.0, 3.0)),
    ((2, None), None, (2.25, 2.25)),
]


@on_ranks(2, [[(error, {grads[rank]}) for _, error, grads in SIZES] for rank in range(2)])
def test_a_plain_mean_keeps_what_the_last_call_left(rank: int) -> list[Any]:
    """The result of the first call is equal on both ranks, so that its plain mean is the result itself."""
    seen = []
    for sizes, _, _ in SIZES:
        model = WRAPPERS["small"]()
        for size in sizes:
            add_gradients(model, rank + 1.0)
            said = error_of(model.all_reduce, sample_size=size)
        seen.append((None if said is None else said[0], set(gradient_values(model).values())))
    return seen


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_micro_batches_in_no_sync_are_one_call(wrapper: str) -> None:
    model = WRAPPERS[wrapper]()
    for _ in range(3):
        model.zero_grad()
        for _ in range(2):
            with model.no_sync():
                add_gradients(model, 1.0)
                model.all_reduce(sample_size=1)
        add_gradients(model, 1.0)
        model.all_reduce(sample_size=3)
        assert set(gradient_values(model).values()) == {1.0}
    with model.no_sync():  # after the last call, and without zero_grad()
        said = error_of(add_gradients, model, 1.0)
    said = said or error_of(model.all_reduce, sample_size=1)
    assert "zero_grad()" in said[1]


@pytest.mark.usefixtures("alone")
def test_a_result_of_a_wrapper_that_shares_the_weight_is_not_divided_again() -> None:
    net = nn.Linear(2, 1)
    first, second = Model(net), Model(nn.Sequential(net))
    add_gradients(first, 2.0)
    first.all_reduce(sample_size=2)
    add_gradients(first, 2.0)

    said = error_of(second.all_reduce, sample_size=2)

    assert "grad of '0.bias' holds the result of an earlier call" in said[1]
    first.zero_grad()
    add_gradients(first, 2.0)
    second.all_reduce(sample_size=2)
    assert set(gradient_values(first).values()) == {1.0}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("sparse", [False, True])
def test_gradients_of_a_function_are_not_divided_again(*, sparse: bool) -> None:
    table = nn.Embedding(3, 2, sparse=sparse)
    call = partial(all_reduce_gradients, table, sample_size=2)
    table(torch.tensor([1])).sum().backward()
    call()
    said = []
    for clear in (False, True):
        if clear:
            table.zero_grad(set_to_none=False)
        table(torch.tensor([1])).sum().backward()
        said.append(error_of(call))

    assert "grad of 'weight' holds the result of an earlier call" in said[0][1]
    assert "no_sync()" not in said[0][1]  # which the module does not have
    assert said[1] is None
    assert table.weight.grad.to_dense()[1].tolist() == [0.5, 0.5]


@pytest.mark.usefixtures("alone")
def test_a_layer_unfrozen_between_calls_hides_no_addition() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    net[0].bias.requires_grad_(False)
    model = Model(net)
    add_gradients(model, 1.0)
    model.all_reduce(sample_size=1)
    net[0].bias.requires_grad_(True)
    add_gradients(model, 1.0)

    for _ in range(2):
        said = error_of(model.all_reduce, sample_size=1)
        assert "holds the result of an earlier call" in said[1]
    model.zero_grad()
    add_gradients(model, 1.0)
    model.all_reduce(sample_size=1)


def _forget_once() -> None:
    model = WRAPPERS["small"]()
    for _ in range(2):
        add_gradients(model, 1.0)
        model.all_reduce()


def _drop_always() -> None:
    for make in WRAPPERS.values():
        model = make()
        for _ in range(3):
            model.zero_grad()
            add_gradients(model, 1.0)
            model.all_reduce(sample_size=1)


@pytest.mark.usefixtures("alone")
def test_nothing_is_read_while_gradients_are_dropped() -> None:
    for train, is_read in ((_forget_once, True), (_drop_always, False)):
        with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
            train()
        assert any(event.key == "aten::_foreach_norm" for event in profiler.key_averages()) == is_read


@pytest.mark.usefixtures("alone")
def test_a_wrapper_that_was_told_of_an_addition_is_freed_and_its_module_steps_freely() -> None:
    model = WRAPPERS["large"]()
    for _ in range(2):
        add_gradients(model, 1.0)
        said = error_of(model.all_reduce, sample_size=1)
    weight = model.module.weight
    del model
    gc.collect()
    torch.optim.SGD([weight], lr=0.1).step()  # with gradients of this rank alone
    weight.sum().backward()
    torch.optim.SGD([weight], lr=0.1).step()

    assert said is not None
    assert not weight._post_accumulate_grad_hooks


def _decay(model: Model) -> None:
    torch._foreach_mul_([parameter.grad for parameter in model.parameters()], 0.5)


def _begin_with_decayed_weights(model: Model) -> None:
    """Weight decay by hand: the gradients are cleared and begin with a term of their own."""
    for parameter in model.parameters():
        parameter.grad.zero_().add_(parameter.detach(), alpha=0.1)  # type: ignore[union-attr]


def _plain_loop(
    rank: int,
    *,
    forgets: tuple[int, ...] = (),
    make: Callable[[], Model] = WRAPPERS["small"],
    calls: int = 1,
    edit: Between = id,
    clear: Between = Model.zero_grad,
    is_scaled: bool = False,
) -> list[str]:
    """``calls``: for each step, on gradients that add up. ``edit``: before the step. ``clear``: unless forgotten.

    ``is_scaled``: with a GradScaler, in the order of README.
    """
    model = make()
    optimizer, scaler = _sgd(model), torch.amp.GradScaler("cpu", init_scale=4.0, enabled=is_scaled)
    for _ in range(5):
        for _ in range(calls):
            scaler.scale(model(torch.full((1, model.module.in_features), rank + 1.0)).sum()).backward()
            model.all_reduce()
        scaler.unscale_(optimizer)
        edit(model)
        scaler.step(optimizer)
        scaler.update()
        if rank not in forgets:
            clear(model)
    return logged_warnings.take()


PLAIN_WRAPPERS = ("small", "large", "gloo", "hook")
ALSO_CLEARS = {**CLEARS, "decay after the step": _decay, "weight decay by hand": _begin_with_decayed_weights}


@on_ranks(2)
def _forgetful_loops(rank: int) -> dict[tuple[str, str, str], list[str]]:
    return {
        (wrapper, edit, who): _plain_loop(rank, forgets=forgets, make=WRAPPERS[wrapper], edit=act)
        for wrapper in PLAIN_WRAPPERS
        for edit, act in (("nothing", id), ("clip", _clip))
        for who, forgets in (("ranks 0-1", (0, 1)), ("rank 1", (1,)))
    }


@pytest.mark.cpu("to tell, the host would have to wait for the device")
def test_gradients_that_a_step_used_and_nobody_cleared_are_told_once_on_rank_0_also_after_a_clip() -> None:
    """After a clip the first forgotten zero_grad() only shows which gradient comes first."""
    first, other = _forgetful_loops()

    for (wrapper, edit, who), told in first.items():
        assert len(told) == 1, (wrapper, edit, who, told)
        call = 2 if edit == "nothing" else 3
        assert told[0].startswith(
            f"all_reduce() call {call}: on {who} backward added to gradients that a step had used"
        ), (wrapper, edit)
        assert "call zero_grad() once per step" in told[0]
    assert not any(other.values())


@on_ranks(2, [{}] * 2)
def test_loops_that_clear_or_rewrite_gradients_after_the_step_are_not_told(rank: int) -> dict[Any, list[str]]:
    found = {
        (clear, edit, calls): _plain_loop(rank, calls=calls, edit=act, clear=ALSO_CLEARS[clear])
        for clear in ALSO_CLEARS
        for edit, act in (("nothing", id), ("clip", _clip))
        for calls in (1, 2)
    }
    return {case: told for case, told in found.items() if told}


@on_ranks(2)
def _scaled_loops(rank: int) -> list[list[str]]:
    loop = partial(_plain_loop, rank, edit=_clip, is_scaled=True)
    makes = (WRAPPERS["small"], partial(Model, nn.Linear(2, 1), checks="detail"))
    clean = [loop(clear=CLEARS[clear]) for clear in ("zero_grad()", "zero_()", "data.zero_()")]
    return [*clean, *(loop(forgets=(0, 1), make=make) for make in makes)]


@pytest.mark.cpu("to tell, the host would have to wait for the device")
def test_a_scaler_and_a_clip_hide_no_forgotten_zero_grad() -> None:
    (*clean, told, at_detail), other = _scaled_loops()

    assert clean == [[]] * 3
    for texts in (told, at_detail):
        assert [text.partition(" backward added to gradients")[0] for text in texts] == [
            "all_reduce() call 3: on ranks 0-1"
        ]
    assert not any(other)
