"""Steps that the guard accepts: of correct programs, on unguarded parameters, and with the call in a pre-hook.

Also: the scope of a guard, and that a failed construction leaves none.
"""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from legacy_ddp import Checks, LayoutError, LegacyDDPError, UnsynchronizedStepError, all_reduce_gradients
from tests.helpers.guarded import Model, assert_guards, assert_steps, backward, net, refused
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script
from tests.helpers.shared_jobs import on_ranks


def _evaluation(model: Model, optimizer: Optimizer) -> None:
    backward(model)
    model.all_reduce()
    with torch.no_grad():
        model.eval()(torch.ones(2, 3))
    with torch.inference_mode():
        model(torch.ones(2, 3))
    torch.autograd.grad(model.train()(torch.ones(2, 3)).sum(), list(model.parameters()))
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
@pytest.mark.parametrize("program", [_evaluation, _other_parameters])
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

    run = run_script("-c", _FRESH, str(tmp_path / "models"))

    assert (run.returncode, run.stdout, run.stderr) == (0, "refused\n", "")


@pytest.mark.usefixtures("alone")
def test_one_parameter_of_a_late_layer_that_backward_reached_after_the_call_is_enough() -> None:
    model = Model(net())
    model.module.append(nn.Linear(1, 1))
    backward(model)
    model.all_reduce()
    late = SGD(model.module[3].parameters(), lr=0.1)
    late.step()
    model(torch.ones(1, 3)).sum().backward(inputs=[model.module[3].bias])
    with refused(model, late) as caught:
        late.step()

    assert "last backward:\n  parameter '3.bias' of the wrapped Sequential\ncall" in str(caught.value)
    assert caught.value.parameter == "3.bias"
    assert_steps(model, SGD([model.module[0].weight], lr=0.1))  # holds reduced ones only


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
    """Another pre-hook makes no call, and runs once in each step."""
    model, seen = Model(net()), []
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(1))
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
    assert len(seen) == 6


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


# A failed construction leaves nothing on the module


def _count_hooks(module: nn.Module) -> int:
    """The hooks on gradients of its parameters."""
    return sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in module.parameters())


def _other_layouts(rank: int) -> tuple[nn.Module, type[LegacyDDPError]]:
    return nn.Sequential(net(), nn.Linear(1, 1 + rank)), LayoutError


class _Interrupting(nn.Linear):
    """Ctrl-C while the wrapper sends buffers, behind what all ranks agreed on."""

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        if _count_hooks(self):
            raise KeyboardInterrupt
        return super().named_buffers(*args, **kwargs)


def _interrupted(_: int) -> tuple[nn.Module, type[BaseException]]:
    return _Interrupting(3, 1), KeyboardInterrupt


def _train_alone(make: Callable[[int], tuple[nn.Module, type[BaseException]]], rank: int) -> tuple[int, bool]:
    module, expected = make(rank)
    with pytest.raises(expected) as caught:  # keeps the error, its frames, and so the wrapper
        Model(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    weight = next(module.parameters())
    before = weight.detach().clone()
    backward(module)
    optimizer.step()  # of the plain module, on this rank alone
    stepped = torch.equal(weight, before - 0.5 * weight.grad)
    assert caught.value is not None
    return _count_hooks(module), stepped


@pytest.mark.parametrize("make, world_size", [(_other_layouts, 2), (_interrupted, 1)])
def test_a_module_whose_wrapper_failed_is_trained_without_it(
    make: Callable[[int], tuple[nn.Module, type[BaseException]]], world_size: int
) -> None:
    assert run_ranks(partial(_train_alone, make), world_size) == [(0, True)] * world_size


@on_ranks(2, [True, True])
def test_a_second_wrapper_does_not_use_the_settings_of_the_first(rank: int) -> bool:
    module = net()
    with pytest.raises(LayoutError) as caught:
        Model(module, buffer_size=1 + rank)
    model = Model(module, checks=Checks(unsynchronized_step="allow"))
    backward(model)
    assert_steps(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return caught.value.ranks == ()
