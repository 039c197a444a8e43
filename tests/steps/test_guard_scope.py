"""Steps that the guard accepts: of correct programs, on unguarded parameters, and with the call in a pre-hook."""

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from legacy_ddp import Checks, UnsynchronizedStepError, all_reduce_gradients
from tests.helpers import logged_warnings
from tests.helpers.guarded import Model, assert_guards, assert_steps, backward, net, refused
from tests.helpers.paths import ROOT


def _evaluation(model: Model, optimizer: Optimizer) -> None:
    backward(model)
    model.all_reduce()
    with torch.no_grad():
        model.eval()(torch.ones(2, 3))
    with torch.inference_mode():
        model(torch.ones(2, 3))
    torch.autograd.grad(model.train()(torch.ones(2, 3)).sum(), list(model.parameters()))
    optimizer.step()


def _backward_in_no_sync(model: Model, optimizer: Optimizer) -> None:
    with model.no_sync():
        backward(model)
    model.all_reduce()
    optimizer.step()


def _accumulation(model: Model, optimizer: Optimizer) -> None:
    for _ in range(3):
        with model.no_sync():
            backward(model)
            model.all_reduce()
    backward(model)
    model.all_reduce()
    optimizer.step()


def _other_parameters(model: Model, optimizer: Optimizer) -> None:
    other = net()
    backward(model)
    backward(other)
    SGD(other.parameters(), lr=0.1).step()
    model.all_reduce()
    mixture = SGD([*other.parameters(), *model.parameters()], lr=0.1)
    mixture.step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("program", [_evaluation, _backward_in_no_sync, _accumulation, _other_parameters])
def test_a_correct_program_is_not_refused_and_stays_guarded(program: Callable[[Model, Optimizer], None]) -> None:
    model = Model(net())
    optimizer = SGD(model.parameters(), lr=0.1)

    for _ in range(2):
        program(model, optimizer)
        optimizer.zero_grad()
    assert_guards(model, optimizer)


@pytest.mark.usefixtures("alone")
def test_layers_that_are_ignored_may_step_by_themselves() -> None:
    model = Model(net(), ignore=["2.weight", "2.bias"])
    backward(model)

    assert_steps(model, SGD(model.module[2].parameters(), lr=0.1))
    with pytest.raises(UnsynchronizedStepError, match=r"2 parameters of the wrapped \w+, first '0\.weight'"):
        SGD(model.parameters(), lr=0.1).step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("set_to_none", [True, False])
def test_two_wrappers_trained_against_each_other_are_not_refused(set_to_none: bool) -> None:
    generator, critic = Model(nn.Linear(3, 3)), Model(net())
    optimizers = [SGD(model.parameters(), lr=0.1) for model in (generator, critic)]

    for _ in range(3):
        optimizers[0].zero_grad(set_to_none)
        backward(nn.Sequential(generator, critic))  # leaves gradients in the critic as well
        generator.all_reduce()
        optimizers[0].step()
        optimizers[1].zero_grad(set_to_none)
        critic(generator(torch.ones(2, 3)).detach()).sum().backward()
        critic.all_reduce()
        optimizers[1].step()
    assert not logged_warnings.take()
    optimizers[0].zero_grad(set_to_none)
    backward(nn.Sequential(generator, critic))
    generator.all_reduce()
    with pytest.raises(UnsynchronizedStepError):
        optimizers[1].step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("caller", [0, "function"])
def test_one_call_is_enough_for_a_parameter_that_several_share(caller: Any) -> None:
    trunk = nn.Linear(3, 3)
    models = [Model(nn.Sequential(trunk, nn.Linear(3, 1))) for _ in range(2)]
    optimizer = SGD(trunk.parameters(), lr=0.1)
    call = partial(all_reduce_gradients, trunk) if caller == "function" else models[caller].all_reduce

    for _ in range(2):
        for model in models:
            backward(model)
        with refused(trunk, optimizer):
            optimizer.step()
        call()
        assert_steps(trunk, optimizer)
        backward(models[0])
        with refused(trunk, optimizer):
            optimizer.step()
        with models[1].no_sync():
            assert_steps(trunk, optimizer)
        for model in models:
            model.zero_grad()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("checks", ["off", Checks(unsynchronized_step="allow")])
@pytest.mark.parametrize("first", [True, False])
def test_of_wrappers_that_share_one_that_guards_is_enough(checks: Any, first: bool) -> None:
    trunk = nn.Linear(3, 3)
    both = [Model(trunk, checks=checks), Model(nn.Sequential(trunk))]
    if not first:
        both = [Model(nn.Sequential(trunk)), Model(trunk, checks=checks)]
    for model in both:
        assert_guards(model, SGD(trunk.parameters(), lr=0.1))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("checks", ["off", Checks(unsynchronized_step="allow")])
def test_the_guard_can_be_switched_off(checks: str | Checks) -> None:
    model = Model(net(), checks=checks)
    backward(model)

    assert_steps(model, SGD(model.parameters(), lr=0.1))


@pytest.mark.usefixtures("alone")
def test_the_function_guards_nothing_and_counts_as_a_call_on_a_wrapper() -> None:
    plain, model = net(), Model(net())
    for target in (plain, model):
        backward(target)
        all_reduce_gradients(target)
        assert_steps(target, SGD(target.parameters(), lr=0.1))
        backward(target)
    assert_steps(plain, SGD(plain.parameters(), lr=0.1))
    with pytest.raises(UnsynchronizedStepError):
        SGD(model.parameters(), lr=0.1).step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_guards_its_own_parameters(duplicate: Callable[[Model], Model]) -> None:
    model = Model(net())
    backward(model)
    with model.no_sync():
        other = duplicate(model)

        assert_guards(other, SGD(other.parameters(), lr=0.1))
    with pytest.raises(UnsynchronizedStepError):
        SGD(model.parameters(), lr=0.1).step()


@pytest.mark.usefixtures("alone")
def test_a_module_that_is_not_wrapped_any_more_steps_freely() -> None:
    model = Model(net())
    module = model.module
    backward(model)
    del model
    gc.collect()

    assert_steps(module, SGD(module.parameters(), lr=0.1))
    backward(module)
    assert_steps(module, SGD(module.parameters(), lr=0.1))


@pytest.mark.usefixtures("alone")
def test_a_late_layer_is_guarded_from_its_first_call_on() -> None:
    model = Model(net())
    model.module.append(nn.Linear(1, 1))
    backward(model)
    model.all_reduce()
    late = SGD(model.module[3].parameters(), lr=0.1)
    late.step()
    backward(model)
    with refused(model, late) as caught:
        late.step()

    assert caught.value.parameter == "3.weight"


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
            pickle.dump(Model(net(), checks=checks), file)

    command = [sys.executable, "-c", _FRESH, str(tmp_path / "models")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)

    assert (run.returncode, run.stdout, run.stderr) == (0, "refused\n", "")


class Critic(nn.Sequential):
    """A class of its own, to be named."""


@pytest.mark.usefixtures("alone")
def test_the_error_names_the_wrapped_classes_of_a_script_with_several_wrappers() -> None:
    """In a GAN both networks had the same names of parameters, and the text did not tell them apart."""
    models = [Model(kind(nn.Linear(2, 1))) for kind in (nn.Sequential, Critic)]
    optimizer = SGD([weight for model in models for weight in model.parameters()], lr=0.1)
    for model, classes in zip(models, ("Sequential", "Sequential, Critic"), strict=True):
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(UnsynchronizedStepError, match=f"parameters of the wrapped {classes}, first"):
            optimizer.step()


# Pre-hooks of the optimizer: one of them may make the call


def _call_before_step(optimizer: Optimizer, model: Model) -> Any:
    return optimizer.register_step_pre_hook(lambda *_: model.all_reduce() and None)


@pytest.mark.usefixtures("alone")
def test_the_call_may_be_made_by_a_pre_hook_of_the_optimizer() -> None:
    model = Model(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = _call_before_step(optimizer, model)
    for _ in range(3):
        backward(model)
        assert_steps(model, optimizer)
        optimizer.zero_grad()
    handle.remove()
    backward(model)
    for _ in range(2):
        with refused(model, optimizer):
            optimizer.step()

    other = _call_before_step(optimizer, model)  # behind the guard's own place, which then moves on
    assert_steps(model, optimizer)
    other.remove()


@pytest.mark.usefixtures("alone")
def test_pre_hooks_that_do_not_call_hide_nothing() -> None:
    model, seen = Model(net()), []
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
    backward(model)
    for _ in range(2):
        with refused(model, optimizer):
            optimizer.step()
    model.all_reduce()
    assert_steps(model, optimizer)

    assert len(seen) == 3


@pytest.mark.usefixtures("alone")
def test_a_closure_that_a_pre_hook_brings_is_judged_by_the_gradients_it_leaves() -> None:
    model = Model(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda _, args, __: (args, {"closure": lambda: backward(model)}))

    with pytest.raises(UnsynchronizedStepError):
        optimizer.step()


@pytest.mark.usefixtures("alone")
def test_an_optimizer_that_was_guarded_behind_its_own_hooks_is_copied_and_pickled_as_ever() -> None:
    model = Model(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = _call_before_step(optimizer, model)
    backward(model)
    optimizer.step()
    handle.remove()

    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert other.state_dict() == optimizer.state_dict()
        assert not other._optimizer_step_pre_hooks
