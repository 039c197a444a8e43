"""Is a step without the call refused before anything changes, and is no correct program ever refused?"""

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from legacy_ddp import (
    Checks,
    LegacyDistributedDataParallel,
    PeerError,
    PeerLostError,
    UnsynchronizedStepError,
    all_reduce_gradients,
)
from tests.ranks import run_ranks
from tests.small import error_of

ROOT = Path(__file__).parent.parent
Model = LegacyDistributedDataParallel


def _net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def _backward(model: nn.Module, factor: float = 1.0) -> None:
    (model(torch.ones(2, 3)).sum() * factor).backward()


def _copies(model: nn.Module, optimizer: Optimizer) -> list[object]:
    """All that a step may change."""
    values = [parameter.detach().clone() for parameter in model.parameters()]
    grads = [None if p.grad is None else p.grad.detach().to_dense().clone() for p in model.parameters()]
    return [values, grads, copy.deepcopy(optimizer.state_dict())]


def _assert_same(actual: object, expected: object) -> None:
    if isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor)
        assert torch.equal(actual, expected)
    elif isinstance(expected, dict | list):
        assert type(actual) is type(expected)
        assert len(actual) == len(expected)  # type: ignore[arg-type]
        for key in expected if isinstance(expected, dict) else range(len(expected)):
            _assert_same(actual[key], expected[key])  # type: ignore[index]
    else:
        assert actual == expected


@contextmanager
def _refused(model: nn.Module, optimizer: Optimizer) -> Iterator[pytest.ExceptionInfo[UnsynchronizedStepError]]:
    """What happens in the block is refused and changes nothing."""
    before = _copies(model, optimizer)
    with pytest.raises(UnsynchronizedStepError) as caught:
        yield caught
    _assert_same(_copies(model, optimizer), before)


def _assert_steps(model: nn.Module, optimizer: Optimizer) -> None:
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    assert not all(torch.equal(*pair) for pair in zip(model.parameters(), before, strict=True))


def _assert_guards(model: Model, optimizer: Optimizer, factor: float = 1.0) -> None:
    """A forgotten call is refused, and one that follows is not."""
    optimizer.zero_grad()
    _backward(model, factor)
    with _refused(model, optimizer):
        optimizer.step()
    model.all_reduce()
    _assert_steps(model, optimizer)


# --- Refused ----------------------------------------------------------------------------------------------------------


class _OwnOptimizer(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad
                    self.state[parameter]["steps"] = self.state[parameter].get("steps", 0) + 1


_OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(SGD, lr=0.1, momentum=0.9),
    "SGD, one by one": partial(SGD, lr=0.1, foreach=False),
    "AdamW, foreach": partial(AdamW, foreach=True, capturable=False),
    "AdamW, fused": partial(AdamW, fused=True),
    "own": _OwnOptimizer,
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_a_forgotten_call_is_refused_by_every_optimizer_and_nothing_changes(name: str) -> None:
    model = Model(_net())
    optimizer = _OPTIMIZERS[name](model.parameters())

    for _ in range(3):  # from the second time on there is optimizer state to keep
        _assert_guards(model, optimizer)


@pytest.mark.usefixtures("alone")
def test_the_error_names_the_optimizer_the_parameters_and_what_to_do() -> None:
    model = Model(_net())
    optimizer = SGD(model.parameters(), lr=0.1)
    _backward(model)
    with _refused(model, optimizer) as caught:
        optimizer.step()

    assert str(caught.value) == (
        "step() of SGD would use gradients that were not reduced since the last backward: 4 parameters, first "
        "'0.weight'; call model.all_reduce() between backward() and step() (a step meant for this rank alone belongs "
        'inside no_sync(); Checks(unsynchronized_step="allow") switches this check off)'
    )
    error = caught.value
    assert (error.parameter, error.ranks, error.call, error.phase) == ("0.weight", (), None, None)


@pytest.mark.usefixtures("alone")
def test_one_parameter_that_backward_reached_after_the_call_is_enough() -> None:
    model = Model(_net())
    optimizer = SGD(model.parameters(), lr=0.1)
    _backward(model)
    model.all_reduce()
    model(torch.ones(1, 3)).sum().backward(inputs=[model.module[2].bias])
    with _refused(model, optimizer) as caught:
        optimizer.step()

    assert "last backward: parameter '2.bias'; call" in str(caught.value)
    assert caught.value.parameter == "2.bias"
    _assert_steps(model, SGD([model.module[0].weight], lr=0.1))  # holds reduced ones only


def _forgotten(model: Model) -> None:
    _backward(model)


def _backward_after_the_call(model: Model) -> None:
    _backward(model)
    model.all_reduce()
    _backward(model)


def _failed_call_swallowed(model: Model) -> None:
    _backward(model)
    with suppress(TypeError):
        model.all_reduce(sample_size="many")  # type: ignore[arg-type]


def _call_inside_no_sync_only(model: Model) -> None:
    with model.no_sync():
        _backward(model)
        assert not model.all_reduce().synchronized


def _exception_out_of_no_sync(model: Model) -> None:
    with suppress(KeyError), model.no_sync(), model.no_sync():
        _backward(model)
        raise KeyError


def _local_step_then_a_global_one(model: Model) -> None:
    _backward(model)
    with model.no_sync():
        SGD(model.parameters(), lr=0.1).step()


def _no_sync_of_another_wrapper(model: Model) -> None:
    with Model(_net()).no_sync():
        _backward(model)
    Model(_net()).all_reduce()


def _dropped_and_done_again(model: Model) -> None:
    _backward(model)
    model.zero_grad(set_to_none=False)
    _backward(model)


def _cast_between(model: Model) -> None:
    model.double()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    model.all_reduce()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()


def _planned_anew_after_backward(model: Model) -> None:
    """A failed call that planned anew has not forgotten what was counted."""
    _backward(model)
    model.module[2].bias.requires_grad_(False)
    _failed_call_swallowed(model)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "program",
    [
        _forgotten,
        _backward_after_the_call,
        _failed_call_swallowed,
        _call_inside_no_sync_only,
        _exception_out_of_no_sync,
        _local_step_then_a_global_one,
        _no_sync_of_another_wrapper,
        _dropped_and_done_again,
        _cast_between,
        _planned_anew_after_backward,
    ],
)
def test_a_step_on_gradients_of_this_rank_alone_is_refused_until_the_call_is_made(
    program: Callable[[Model], None],
) -> None:
    model = Model(_net())
    optimizer = SGD(model.parameters(), lr=0.1)
    program(model)
    for _ in range(2):
        with _refused(model, optimizer):
            optimizer.step()

    model.all_reduce()
    _assert_steps(model, optimizer)


@pytest.mark.usefixtures("alone")
def test_hooks_of_somebody_else_on_the_parameters_hide_nothing() -> None:
    net, seen = _net(), []
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)
    model = Model(net)
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(seen.append)

    _assert_guards(model, SGD(model.parameters(), lr=0.1))
    assert len(seen) == 8


@pytest.mark.usefixtures("alone")
def test_a_scaled_step_is_refused_and_so_is_one_under_a_schedule() -> None:
    model = Model(_net())
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    with pytest.raises(UnsynchronizedStepError):
        scaler.step(optimizer)
    optimizer.zero_grad()
    _assert_guards(model, optimizer)
    schedule.step()
    _assert_guards(model, optimizer)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("optimizer_class", [partial(SGD, lr=0.1), torch.optim.SparseAdam])
def test_sparse_gradients_are_guarded(optimizer_class: Callable[..., Optimizer]) -> None:
    model = Model(nn.Embedding(4, 2, sparse=True))
    optimizer = optimizer_class(model.parameters())

    def backward(factor: float) -> None:
        (model(torch.tensor([1, 1])) * torch.tensor([[1.0], [factor]])).sum().backward()

    backward(1)
    with _refused(model, optimizer):
        optimizer.step()
    model.all_reduce()
    _assert_steps(model, optimizer)
    backward(1)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    backward(-1)  # entries of one row that add up to zero
    optimizer.step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("by_keyword", [False, True])
@pytest.mark.parametrize(
    "optimizer_class", [torch.optim.LBFGS, partial(torch.optim.LBFGS, line_search_fn="strong_wolfe"), SGD, AdamW]
)
def test_a_closure_is_judged_by_the_gradients_it_leaves(
    optimizer_class: Callable[..., Optimizer], by_keyword: bool
) -> None:
    model = Model(_net())
    optimizer = optimizer_class(model.parameters(), lr=0.01)

    def closure(call: bool) -> float:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        if call:
            model.all_reduce()
        return loss.item()

    def step(call: bool) -> Any:
        return optimizer.step(closure=partial(closure, call)) if by_keyword else optimizer.step(partial(closure, call))

    weights = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(UnsynchronizedStepError):
        step(False)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), weights, strict=True))
    step(True)  # in spite of what the one before left
    _backward(model)  # as another model's loss may do; the closure drops it
    for _ in range(3):
        step(True)
    assert not any(torch.equal(*pair) for pair in zip(model.parameters(), weights, strict=True))
    with pytest.raises(UnsynchronizedStepError):
        step(False)


# --- Not refused ------------------------------------------------------------------------------------------------------


def _evaluation(model: Model, optimizer: Optimizer) -> None:
    _backward(model)
    model.all_reduce()
    with torch.no_grad():
        model.eval()(torch.ones(2, 3))
    with torch.inference_mode():
        model(torch.ones(2, 3))
    torch.autograd.grad(model.train()(torch.ones(2, 3)).sum(), list(model.parameters()))
    optimizer.step()


def _no_gradients_yet(model: Model, optimizer: Optimizer) -> None:
    optimizer.step()


def _dropped(set_to_none: bool, model: Model, optimizer: Optimizer) -> None:
    _backward(model)
    optimizer.zero_grad(set_to_none)
    optimizer.step()


def _scaler_skips(model: Model, optimizer: Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1.0, torch.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).sum() * factor).backward()
        model.all_reduce()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4.0


def _local_step(model: Model, optimizer: Optimizer) -> None:
    _backward(model)
    with model.no_sync():
        optimizer.step()
        with suppress(KeyError), model.no_sync():
            optimizer.step()
            raise KeyError
        optimizer.step()


def _backward_in_no_sync(model: Model, optimizer: Optimizer) -> None:
    with model.no_sync():
        _backward(model)
    model.all_reduce()
    optimizer.step()


def _accumulation(model: Model, optimizer: Optimizer) -> None:
    for _ in range(3):
        with model.no_sync():
            _backward(model)
            model.all_reduce()
    _backward(model)
    model.all_reduce()
    optimizer.step()


def _gradients_edited(model: Model, optimizer: Optimizer) -> None:
    _backward(model)
    model.all_reduce()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad + 1
    optimizer.step()


def _gradients_assigned(model: Model, optimizer: Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def _backward_twice(model: Model, optimizer: Optimizer) -> None:
    loss = model(torch.ones(2, 3)).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    model.all_reduce()
    optimizer.step()


def _left_out(model: Model, optimizer: Optimizer) -> None:
    _backward(model)
    assert model.all_reduce(skip=True).skipped
    optimizer.step()
    _backward(model)
    assert model.all_reduce(0).skipped
    optimizer.step()


def _failed_then_made(model: Model, optimizer: Optimizer) -> None:
    _backward(model)
    with suppress(TypeError):
        model.all_reduce(sample_size="many")  # type: ignore[arg-type]
    model.all_reduce()
    optimizer.step()


def _frozen_and_unfrozen(model: Model, optimizer: Optimizer) -> None:
    model.module[0].requires_grad_(False)
    _backward(model)
    model.all_reduce()
    optimizer.step()
    optimizer.zero_grad()
    model.module[0].requires_grad_(True)
    _backward(model)
    model.all_reduce()
    optimizer.step()


def _stepped_twice(model: Model, optimizer: Optimizer) -> None:
    _backward(model)
    model.all_reduce()
    optimizer.step()
    optimizer.step()


def _other_parameters(model: Model, optimizer: Optimizer) -> None:
    other = _net()
    _backward(model)
    _backward(other)
    SGD(other.parameters(), lr=0.1).step()
    model.all_reduce()
    mixture = SGD([*other.parameters(), *model.parameters()], lr=0.1)
    mixture.step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "program",
    [
        _evaluation,
        _no_gradients_yet,
        partial(_dropped, True),
        partial(_dropped, False),
        _scaler_skips,
        _local_step,
        _backward_in_no_sync,
        _accumulation,
        _gradients_edited,
        _gradients_assigned,
        _backward_twice,
        _left_out,
        _failed_then_made,
        _frozen_and_unfrozen,
        _stepped_twice,
        _other_parameters,
    ],
)
def test_a_correct_program_is_not_refused_and_stays_guarded(program: Callable[[Model, Optimizer], None]) -> None:
    model = Model(_net())
    optimizer = SGD(model.parameters(), lr=0.1)

    for _ in range(2):
        program(model, optimizer)
        optimizer.zero_grad()
    _assert_guards(model, optimizer)


@pytest.mark.usefixtures("alone")
def test_layers_that_are_ignored_may_step_by_themselves() -> None:
    model = Model(_net(), ignore=["2.weight", "2.bias"])
    _backward(model)

    _assert_steps(model, SGD(model.module[2].parameters(), lr=0.1))
    with pytest.raises(UnsynchronizedStepError, match=r"2 parameters, first '0\.weight'"):
        SGD(model.parameters(), lr=0.1).step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_two_wrappers_trained_against_each_other_are_not_refused(set_to_none: bool) -> None:
    generator, critic = Model(nn.Linear(3, 3)), Model(_net())
    optimizers = [SGD(model.parameters(), lr=0.1) for model in (generator, critic)]

    for _ in range(3):
        optimizers[0].zero_grad(set_to_none)
        _backward(nn.Sequential(generator, critic))  # leaves gradients in the critic as well
        generator.all_reduce()
        optimizers[0].step()
        optimizers[1].zero_grad(set_to_none)
        critic(generator(torch.ones(2, 3)).detach()).sum().backward()
        critic.all_reduce()
        optimizers[1].step()
    _backward(nn.Sequential(generator, critic))
    generator.all_reduce()
    with pytest.raises(UnsynchronizedStepError):
        optimizers[1].step()


# --- Who is asked -----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("caller", [0, 1, "function"])
def test_one_call_is_enough_for_a_parameter_that_several_share(caller: Any) -> None:
    trunk = nn.Linear(3, 3)
    models = [Model(nn.Sequential(trunk, nn.Linear(3, 1))) for _ in range(2)]
    optimizer = SGD(trunk.parameters(), lr=0.1)
    call = partial(all_reduce_gradients, trunk) if caller == "function" else models[caller].all_reduce

    for _ in range(2):
        for model in models:
            _backward(model)
        with _refused(trunk, optimizer):
            optimizer.step()
        call()
        _assert_steps(trunk, optimizer)
        _backward(models[0])
        with _refused(trunk, optimizer):
            optimizer.step()
        with models[1].no_sync():
            _assert_steps(trunk, optimizer)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("checks", ["off", Checks(unsynchronized_step="allow")])
@pytest.mark.parametrize("first", [True, False])
def test_of_wrappers_that_share_one_that_guards_is_enough(checks: Any, first: bool) -> None:
    trunk = nn.Linear(3, 3)
    both = [Model(trunk, checks=checks), Model(nn.Sequential(trunk))]
    if not first:
        both = [Model(nn.Sequential(trunk)), Model(trunk, checks=checks)]
    for model in both:
        _assert_guards(model, SGD(trunk.parameters(), lr=0.1))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("checks", ["off", Checks(level="off"), Checks(unsynchronized_step="allow")])
def test_the_guard_can_be_switched_off(checks: str | Checks) -> None:
    model = Model(_net(), checks=checks)
    _backward(model)

    _assert_steps(model, SGD(model.parameters(), lr=0.1))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("level, allowed", [("off", "raise"), ("info", "allow"), ("info", "raise")])
def test_the_environment_switches_the_level_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, level: str, allowed: str
) -> None:
    monkeypatch.setenv("LEGACY_DDP_CHECKS", level)
    model = Model(_net(), checks=Checks(level="off", unsynchronized_step=allowed))
    optimizer = SGD(model.parameters(), lr=0.1)
    _backward(model)

    if (level, allowed) == ("info", "raise"):
        with _refused(model, optimizer):
            optimizer.step()
    else:
        _assert_steps(model, optimizer)


@pytest.mark.usefixtures("alone")
def test_the_function_guards_nothing_and_counts_as_a_call_on_a_wrapper() -> None:
    plain, model = _net(), Model(_net())
    for target in (plain, model):
        _backward(target)
        all_reduce_gradients(target)
        _assert_steps(target, SGD(target.parameters(), lr=0.1))
        _backward(target)
    _assert_steps(plain, SGD(plain.parameters(), lr=0.1))
    with pytest.raises(UnsynchronizedStepError):
        SGD(model.parameters(), lr=0.1).step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_guards_its_own_parameters(duplicate: Callable[[Model], Model]) -> None:
    model = Model(_net())
    _backward(model)
    with model.no_sync():
        other = duplicate(model)

        _assert_guards(other, SGD(other.parameters(), lr=0.1))
    with pytest.raises(UnsynchronizedStepError):
        SGD(model.parameters(), lr=0.1).step()


@pytest.mark.usefixtures("alone")
def test_a_module_that_is_not_wrapped_any_more_steps_freely() -> None:
    model = Model(_net())
    module = model.module
    _backward(model)
    del model
    gc.collect()

    _assert_steps(module, SGD(module.parameters(), lr=0.1))
    _backward(module)
    _assert_steps(module, SGD(module.parameters(), lr=0.1))


@pytest.mark.usefixtures("alone")
def test_a_late_layer_is_guarded_from_its_first_call_on() -> None:
    model = Model(_net())
    model.module.append(nn.Linear(1, 1))
    _backward(model)
    model.all_reduce()
    late = SGD(model.module[3].parameters(), lr=0.1)
    late.step()
    _backward(model)
    with _refused(model, late) as caught:
        late.step()

    assert caught.value.parameter == "3.weight"


@pytest.mark.usefixtures("alone")
def test_a_parameter_whose_contents_are_swapped_is_not_refused() -> None:
    model = Model(_net())
    optimizer = SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for parameter in model.parameters():  # torch takes hooks away with the contents
            torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone()))
        _backward(model)
        model.all_reduce()
        _assert_steps(model, optimizer)


_FRESH = """
import pickle, sys, torch
from torch.optim import optimizer
import legacy_ddp
assert not optimizer._global_optimizer_pre_hooks
with open(sys.argv[1], "rb") as file:
    models = [pickle.load(file) for _ in range(3)]
    assert [m._settings.checks.level for m in models] == ["off", "info", "info"]
assert len(optimizer._global_optimizer_pre_hooks) == 1
models[1](torch.ones(1, 3)).sum().backward()
try:
    torch.optim.SGD(models[1].parameters(), lr=0.1).step()
except legacy_ddp.UnsynchronizedStepError:
    print("refused")
"""


@pytest.mark.usefixtures("alone")
def test_importing_registers_nothing_and_unpickling_guards_in_a_process_without_a_group(tmp_path: Path) -> None:
    with (tmp_path / "models").open("wb") as file:
        for checks in ("off", "info", "info"):
            pickle.dump(Model(_net(), checks=checks), file)

    command = [sys.executable, "-c", _FRESH, str(tmp_path / "models")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)

    assert (run.returncode, run.stdout, run.stderr) == (0, "refused\n", "")


# --- Several ranks ----------------------------------------------------------------------------------------------------


def _forget_on_rank_1(rank: int, go_on: bool) -> tuple[int, str, list[float]]:
    torch.manual_seed(0)
    model = Model(_net())
    optimizer = SGD(model.parameters(), lr=0.1)
    said, calls = "", 0
    for step in range(4):
        optimizer.zero_grad()
        _backward(model, 1.0 + rank)
        try:
            if (rank, step) != (1, 2):
                calls = model.all_reduce().call
            optimizer.step()
        except (UnsynchronizedStepError, PeerLostError) as error:
            said = type(error).__name__
            if not go_on:
                break
            calls = model.all_reduce().call
            optimizer.step()
    return calls, said, torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def test_a_rank_that_forgot_can_make_the_call_after_the_error() -> None:
    first, second = run_ranks(_forget_on_rank_1, 2, True)

    assert first[:2] == (4, "")
    assert second == (4, "UnsynchronizedStepError", first[2])


def test_the_others_hear_of_a_rank_that_forgot_when_it_ends() -> None:
    first, second = run_ranks(_forget_on_rank_1, 2, False, timeout_seconds=30)

    assert first[:2] == (2, "PeerLostError")
    assert second == (2, "UnsynchronizedStepError", first[2])


def _sit_out(rank: int) -> tuple[bool, bool]:
    model = Model(_net())
    optimizer = SGD(model.parameters(), lr=0.1)
    _backward(model, 1.0 + rank)
    model.all_reduce(skip=rank == 1)
    stepped = error_of(optimizer.step) is None
    _backward(model)
    return stepped, error_of(optimizer.step) is None


def test_a_rank_that_sat_out_may_step_on_what_the_others_brought() -> None:
    assert run_ranks(_sit_out, 2) == [(True, False)] * 2


def _swallow_an_agreed_error(rank: int) -> tuple[str, bool, bool]:
    model = Model(_net())
    optimizer = SGD(model.parameters(), lr=0.1)
    _backward(model)
    try:
        model.all_reduce("wrong" if rank else None)  # type: ignore[arg-type]
    except PeerError as error:
        said = type(error).__name__
    refused = error_of(optimizer.step) is not None
    model.all_reduce()
    return said, refused, error_of(optimizer.step) is None


def test_an_agreed_error_that_is_swallowed_leaves_the_step_refused_on_every_rank() -> None:
    assert run_ranks(_swallow_an_agreed_error, 2) == [("PeerError", True, True)] * 2
