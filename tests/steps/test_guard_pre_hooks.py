"""The guard beside pre-hooks of the optimizer: one of them may make the call."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from legacy_ddp import UnsynchronizedStepError
from tests.helpers.guarded import Model, assert_steps, backward, net, refused
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks


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


@on_ranks(2)
def _with_detail(rank: int) -> list[list[float]]:
    """Each rank's gradients differ until the call, which is made inside the step."""
    model = Model(net(), checks="detail")
    optimizer = SGD(model.parameters(), lr=0.1)
    _call_before_step(optimizer, model)
    for _ in range(4):
        backward(model, 1.0 + rank)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def test_a_call_inside_the_step_is_no_divergence() -> None:
    first, second = _with_detail()

    assert first == second


def _compiled(rank: int, checks: str) -> tuple[int, int, list[float]]:
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's compiler uses torch.jit
    warnings.filterwarnings("ignore", "Profiler", UserWarning)
    import torch._dynamo.utils as dynamo_utils
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch.manual_seed(0)
    model = Model(net(), checks=checks)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.1), capturable=False)
    _call_before_step(optimizer, model)
    step = torch.compile(optimizer.step, backend=counter)
    for _ in range(6):
        backward(model)
        step()
        optimizer.zero_grad()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return counter.frame_count, sum(dynamo_utils.counters["recompiles"].values()), weights


@pytest.mark.thorough
@pytest.mark.cpu("it compiles for the CPU")
def test_a_compiled_step_whose_pre_hook_calls_compiles_nothing_more() -> None:
    assert run_ranks(_compiled, 1, "info", timeout_seconds=120) == run_ranks(_compiled, 1, "off", timeout_seconds=120)
