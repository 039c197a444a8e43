"""The guard: every optimizer refuses a step without the call, before anything changes, until the call is made."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from legacy_ddp import PeerLostError, UnsynchronizedStepError
from tests.helpers.guarded import Model, assert_guards, assert_steps, backward, net, refused
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks


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
    model = Model(net())
    optimizer = _OPTIMIZERS[name](model.parameters())

    for _ in range(3):  # from the second time on there is optimizer state to keep
        assert_guards(model, optimizer)


@pytest.mark.usefixtures("alone")
def test_the_error_names_the_optimizer_the_parameters_and_what_to_do() -> None:
    model = Model(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    backward(model)
    with torch.no_grad():
        model.module[0].weight.grad.zero_()  # it counts, as another gradient is not zero
    with refused(model, optimizer) as caught:
        optimizer.step()

    assert str(caught.value) == (
        "step() of SGD would use gradients that were not reduced since the last backward:\n"
        "  4 parameters of the wrapped Sequential, first '0.weight'\n"
        "call model.all_reduce() between backward() and step(); a step meant for this\n"
        'rank alone belongs inside no_sync(); Checks(unsynchronized_step="allow")\n'
        "switches this check off"
    )
    error = caught.value
    assert (error.parameter, error.ranks, error.call, error.phase) == ("0.weight", (), None, None)


def _cast_between(model: Model) -> None:
    model.double()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    model.all_reduce()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()


def _planned_anew_after_backward(model: Model) -> None:
    """A failed call that planned anew has not forgotten what was counted."""
    backward(model)
    model.module[2].bias.requires_grad_(False)
    model.module[2].bias.grad = None
    backward(model)
    with suppress(TypeError):
        model.all_reduce(sample_size="many")  # type: ignore[arg-type]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("program", [_cast_between, _planned_anew_after_backward])
def test_a_step_on_gradients_of_this_rank_alone_is_refused_until_the_call_is_made(
    program: Callable[[Model], None],
) -> None:
    model = Model(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    program(model)
    for _ in range(2):
        with refused(model, optimizer):
            optimizer.step()

    model.all_reduce()
    assert_steps(model, optimizer)


class _Stepper:
    """A step inside of backward, in several kinds of functions that torch may call there."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def __call__(self, *_: Any) -> None:
        self.optimizer.step()


def _step_at_once(optimizer: Optimizer, *_: Any) -> None:
    optimizer.step()


def _on_leaves(register: str, module: nn.Module, hook: Callable[..., None]) -> None:
    for parameter in module.parameters():
        getattr(parameter, register)(hook)


_AFTER = partial(_on_leaves, "register_post_accumulate_grad_hook")
_on_module: Callable[..., Any] = lambda module, hook: module[1].register_full_backward_hook(hook)  # noqa: E731
# Whether it is registered before the module is wrapped, where, and what is called there.
_REGISTRATIONS: dict[str, tuple[bool, Callable[..., Any], Callable[[Optimizer], Any]]] = {
    "after accumulation": (False, _AFTER, lambda optimizer: partial(_step_at_once, optimizer)),
    "before the wrapper": (True, _AFTER, lambda optimizer: partial(_step_at_once, optimizer)),
    "object": (False, _AFTER, _Stepper),
    "method": (False, _AFTER, lambda optimizer: _Stepper(optimizer).__call__),
    "on tensors": (False, partial(_on_leaves, "register_hook"), _Stepper),
    "on the module": (False, _on_module, _Stepper),
}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", _REGISTRATIONS)
def test_a_step_inside_of_backward_names_the_hook_and_says_to_remove_it(name: str) -> None:
    is_before, register, make_hook = _REGISTRATIONS[name]
    module = net()
    optimizer = SGD(module.parameters(), lr=0.1)
    hook = make_hook(optimizer)
    if is_before:
        register(module, hook)
    model = Model(module)
    if not is_before:
        register(module, hook)
    before = [parameter.detach().clone() for parameter in module.parameters()]

    with pytest.raises(UnsynchronizedStepError) as caught:
        backward(model)

    assert all(map(torch.equal, module.parameters(), before))
    function = _step_at_once if isinstance(hook, partial) else _Stepper.__call__
    code = function.__code__
    text = str(caught.value)
    assert (
        "\nthis step() runs inside of backward(), in a hook of the script:\n"
        f"  test_guard.py:{code.co_firstlineno + 1} in {code.co_name}\nremove this hook" in text
    )
    assert "call model.all_reduce() between" not in text


def _inside_no_sync(model: Model, optimizer: Optimizer) -> None:
    with model.no_sync():
        backward(model)


def _of_another_model(model: Model, optimizer: Optimizer) -> None:
    other = net()
    SGD(other.parameters(), lr=0.1)
    other(torch.ones(2, 3)).sum().backward()
    optimizer.param_groups[0]["params"] = [*other.parameters()]
    backward(model)


def _with_reduced_gradients(model: Model, optimizer: Optimizer) -> None:
    (model(torch.ones(2, 3)).sum() * optimizer.param_groups[0]["params"][0].new_zeros(())).backward()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("program", [_inside_no_sync, _of_another_model, _with_reduced_gradients])
def test_a_step_inside_of_backward_without_new_gradients_of_this_rank_alone_is_not_refused(
    program: Callable[[Model, Optimizer], None],
) -> None:
    model = Model(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    _AFTER(model.module, _Stepper(optimizer))

    program(model, optimizer)


@pytest.mark.usefixtures("alone")
def test_a_scaled_step_is_refused_and_so_is_one_under_a_schedule() -> None:
    model = Model(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    with pytest.raises(UnsynchronizedStepError):
        scaler.step(optimizer)
    scaler.update()  # else the scaler goes on as if it had unscaled the next gradients
    optimizer.zero_grad()
    assert_guards(model, optimizer)
    schedule.step()
    assert_guards(model, optimizer)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("optimizer_class", [partial(SGD, lr=0.1), torch.optim.SparseAdam])
def test_sparse_gradients_are_guarded(optimizer_class: Callable[..., Optimizer]) -> None:
    model = Model(nn.Embedding(4, 2, sparse=True))
    optimizer = optimizer_class(model.parameters())

    def backward(factor: float) -> None:
        (model(torch.tensor([1, 1])) * torch.tensor([[1.0], [factor]])).sum().backward()

    backward(1)
    with refused(model, optimizer):
        optimizer.step()
    model.all_reduce()
    assert_steps(model, optimizer)
    backward(1)
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()
    backward(-1)  # entries of one row that add up to zero
    optimizer.step()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "optimizer_class, by_keyword",
    [
        (torch.optim.LBFGS, False),
        (partial(torch.optim.LBFGS, line_search_fn="strong_wolfe"), True),
        *((SGD, False), (AdamW, True)),
    ],
)
def test_a_closure_is_judged_by_the_gradients_it_leaves(
    optimizer_class: Callable[..., Optimizer], by_keyword: bool
) -> None:
    model = Model(net())
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
    backward(model)  # as another model's loss may do; the closure drops it
    for _ in range(3):
        step(True)
    assert not any(torch.equal(*pair) for pair in zip(model.parameters(), weights, strict=True))
    with pytest.raises(UnsynchronizedStepError):
        step(False)


def _forget_on_rank_1(rank: int, go_on: bool) -> tuple[int, str, list[float]]:
    torch.manual_seed(0)
    model = Model(net())
    optimizer = SGD(model.parameters(), lr=0.1)
    said, calls = "", 0
    for step in range(4):
        optimizer.zero_grad()
        backward(model, 1.0 + rank)
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


def test_the_other_ranks_name_a_rank_without_the_call_when_it_ends() -> None:
    first, second = run_ranks(_forget_on_rank_1, 2, False, timeout_seconds=30)

    assert first[:2] == (2, "PeerLostError")
    assert second == (2, "UnsynchronizedStepError", first[2])


@on_ranks(2)
def _calls_inside_the_step(rank: int) -> list[list[float]]:
    """Each rank's gradients differ until the call."""
    model = Model(net(), checks="detail")
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: model.all_reduce() and None)
    for _ in range(4):
        backward(model, 1.0 + rank)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.flatten().tolist() for parameter in model.parameters()]


def test_a_call_inside_the_step_is_no_divergence() -> None:
    first, second = _calls_inside_the_step()

    assert first == second
