"""Healthy trainings that change gradients, scale losses or repeat data: no clip, no wrong order of a scaler."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers.small_models import Words

Loop = Callable[[int, Checks, int], object]  # rank, checks, steps
SIZE = 64


def make_net(*extra: nn.Module) -> nn.Sequential:
    """A perceptron, equal on every rank; one of its weights is large enough to move to its slot during backward."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, SIZE), nn.Tanh(), *extra, nn.Linear(SIZE, 8 * SIZE), nn.Linear(8 * SIZE, 1))


def net_with_norm() -> nn.Sequential:
    return make_net(nn.BatchNorm1d(SIZE), nn.Dropout(0.3), nn.LayerNorm(SIZE))


def draw(rank: int) -> torch.Tensor:
    return torch.randn(6, 4) + rank


def run_backward(model: nn.Module, rank: int) -> None:
    model(draw(rank)).square().mean().backward()


def train(
    model: LegacyDistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    rank: int,
    steps: int,
    *,
    reduced: Callable[[int], object] = lambda _: None,
    stepped: Callable[[int], object] = lambda _: None,
    backward: Callable[[nn.Module, int], object] = run_backward,
    call: Callable[[int], object] | None = None,
) -> None:
    """Train; ``reduced`` runs after the call of each step, ``stepped`` after the step. ``call``: another call."""
    call = call or (lambda _: model.all_reduce())
    torch.manual_seed(100 + rank)
    for step in range(steps):
        backward(model, rank)
        call(step)
        reduced(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 3 > 0)
        stepped(step)


# Edits of gradients around the call

Edit = Callable[[list[nn.Parameter]], object]


def _with_gradients(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.grad is not None]


def _edited_before(
    rank: int,
    checks: Checks,
    steps: int,
    edit: Edit,
    *,
    backward: Callable[[nn.Module, int], object] = run_backward,
    make: Callable[[], nn.Module] = make_net,
    learning_rate: float = 1e-3,
) -> None:
    model = LegacyDistributedDataParallel(make(), checks=checks)

    def edited(each: nn.Module, rank: int) -> None:
        backward(each, rank)
        edit(_with_gradients(each))

    train(model, torch.optim.SGD(model.parameters(), lr=learning_rate), rank, steps, backward=edited)


def _edited_after(rank: int, checks: Checks, steps: int, edit: Edit) -> None:
    model = LegacyDistributedDataParallel(make_net(), checks=checks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    train(model, optimizer, rank, steps, reduced=lambda _: edit(_with_gradients(model)))


# Edits


def _scale(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad.mul_(0.5)


def _scale_sparse(parameters: Iterable[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = parameter.grad * 0.5


def _clip_loosely(parameters: list[nn.Parameter]) -> None:
    clip_grad_norm_(parameters, 1e6)
    clip_grad_value_(parameters, 1e6)


def _clip(parameters: list[nn.Parameter]) -> None:
    clip_grad_norm_(parameters, 1e-3)
    clip_grad_value_(parameters, 1e-4)


def _take_clear_signs(parameters: Iterable[nn.Parameter]) -> None:
    """As for a vote of the ranks, with zeros where a rank abstains: the norm is nearly the same in every call."""
    for parameter in parameters:
        parameter.grad[parameter.grad.abs() < 1e-9] = 0
        parameter.grad.sign_()


# Other losses, data and models


class _Repeating:
    """The same few batches in every epoch."""

    def __init__(self, count: int) -> None:
        self.count, self.step = count, 0
        self.batches: list[torch.Tensor] = []

    def __call__(self, model: nn.Module, rank: int) -> None:
        self.batches = self.batches or [draw(rank) for _ in range(self.count)]
        model(self.batches[self.step % self.count]).square().mean().backward()
        self.step += 1


def _repeated(rank: int, checks: Checks, steps: int, *, count: int, learning_rate: float) -> None:
    """A test of a model on a few batches, before the learning rate has risen."""
    _edited_before(rank, checks, steps, _scale, backward=_Repeating(count), learning_rate=learning_rate)


class _WideAndDeep(nn.Module):
    """Two parts, of which the results are added: equal gradients for their last biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.wide, self.deep = nn.Linear(4, 10), nn.Sequential(nn.Linear(4, SIZE), nn.ReLU(), nn.Linear(SIZE, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x) + self.deep(x)


def _absolute(model: nn.Module, rank: int) -> None:
    """Most results are far below their aims: the gradients of the biases are 1."""
    ((model(draw(rank)) - 100).abs() * torch.tensor([1.0] * 9 + [0.5])).mean().mul(60).backward()


def _loss_in_bf16(model: nn.Module, rank: int) -> None:
    model(draw(rank).bfloat16()).float().square().mean().backward()


def _dropping(model: nn.Module, rank: int) -> None:
    """The first gradient is dropped, in place."""
    run_backward(model, rank)
    model.zero_grad(set_to_none=False)
    run_backward(model, rank)


def _with_penalty(model: nn.Module, rank: int) -> None:
    data = draw(rank).requires_grad_()
    loss = model(data).square().mean()
    (slope,) = torch.autograd.grad(loss, data, create_graph=True)
    (loss + slope.square().sum()).backward()


# Gradients that hooks, scripts and other calls change


def _clipped_by_hooks(rank: int, checks: Checks, steps: int, *, is_after: bool) -> None:
    """Hooks of the user clip every gradient, before or after backward has added it."""
    model = LegacyDistributedDataParallel(make_net(), checks=checks)

    def clip(parameter: torch.Tensor) -> None:
        parameter.grad.mul_(1e-3 / parameter.grad.norm())

    for parameter in model.parameters():
        if is_after:
            parameter.register_post_accumulate_grad_hook(clip)
        else:
            parameter.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
    train(model, torch.optim.SGD(model.parameters(), lr=1e-3), rank, steps)


def _assigning(model: nn.Module, rank: int) -> None:
    """Gradients of a function transform, clipped and assigned by hand."""
    module = model.module
    named = dict(module.named_parameters())

    def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(module, values, (data,)).square().mean()

    data = draw(rank)
    grads = torch.func.grad(loss)({name: parameter.detach() for name, parameter in named.items()})
    for name, parameter in named.items():
        parameter.grad = grads[name]


def _clips_where_it_skips(rank: int, checks: Checks, steps: int) -> None:
    """A rank that takes no part clips; in another step its gradients count."""
    model = LegacyDistributedDataParallel(make_net(), checks=checks)

    def call(step: int) -> None:
        if is_out := rank == step % 3:
            _clip(_with_gradients(model))
        model.all_reduce(skip=is_out)

    train(model, torch.optim.SGD(model.parameters(), lr=1e-3), rank, steps, call=call)


def _local_steps(rank: int, checks: Checks, steps: int) -> None:
    """Steps inside no_sync() clip as they like, and the weights are broadcast then."""
    model = LegacyDistributedDataParallel(make_net(), checks=checks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def backward(each: LegacyDistributedDataParallel, rank: int) -> None:
        with each.no_sync():
            run_backward(each, rank)
            _clip(_with_gradients(each))
            optimizer.step()
        each.broadcast_parameters()
        optimizer.zero_grad()
        run_backward(each, rank)

    train(model, optimizer, rank, steps, backward=backward)


def _two_calls_of_one_layer(rank: int, checks: Checks, steps: int) -> None:
    """The gradients are clipped after the first call; the second wrapper reduces what is equal on all ranks."""
    model = LegacyDistributedDataParallel(make_net(), checks=checks)
    second = LegacyDistributedDataParallel(model.module, checks=replace(checks, same_data="allow"))

    def reduced(_: int) -> None:
        _clip(_with_gradients(model))
        second.all_reduce()

    train(model, torch.optim.SGD(model.parameters(), lr=1e-3), rank, steps, reduced=reduced)


# GradScalers


def _scaled(rank: int, checks: Checks, steps: int, *, is_passed: bool) -> None:
    """The right order; in some steps a rank overflows, or all ranks leave the step out by themselves."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=10)
    checks = replace(checks, grad_scaler=scaler) if is_passed else checks
    model = LegacyDistributedDataParallel(net_with_norm(), checks=checks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    for step in range(steps):
        with torch.autocast("cpu", torch.bfloat16, enabled=is_passed):
            loss = model(draw(rank)).float().square().mean()
        (scaler.scale(loss) * (torch.inf if step % 17 == 11 and rank == 1 else 1)).backward()
        model.all_reduce()
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1e-3)
        if step % 5:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


class _Probed(nn.Module):
    """An encoder, and a probe that learns from its results without an effect on the encoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.probe = make_net(), nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor, *, is_probed: bool) -> torch.Tensor:
        encoded = self.encoder(x)
        return self.probe(encoded.detach()) if is_probed else encoded


def _two_optimizers_and_one_scaler(rank: int, checks: Checks, steps: int) -> None:
    """A call for each loss, and both steps at the end: the encoder waits unscaled during the call for the probe."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    model = LegacyDistributedDataParallel(_Probed(), checks=checks)
    parts = (model.module.encoder, model.module.probe)
    optimizers = [torch.optim.Adam(part.parameters()) for part in parts]
    torch.manual_seed(100 + rank)
    for _ in range(steps):
        for part, optimizer in zip(parts, optimizers, strict=True):
            scaler.scale((model(draw(rank), is_probed=part is parts[1]) - 1).square().mean()).backward()
            model.all_reduce()
            scaler.unscale_(optimizer)
            clip_grad_norm_(part.parameters(), 1e-3)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


LOOPS: dict[str, Loop] = {
    "edit: scaled": partial(_edited_before, edit=_scale),
    "edit: clips that do not bind": partial(_edited_before, edit=_clip_loosely),
    "edit: clips after the call": partial(_edited_after, edit=_clip),
    "edit: signs and zeros": partial(_edited_before, edit=_take_clear_signs, learning_rate=1e-5),
    "edit: after dropped gradients": partial(_edited_before, edit=_scale, backward=_dropping),
    "edit: with a gradient penalty": partial(_edited_before, edit=_scale, backward=_with_penalty),
    "edit: in bf16": partial(_edited_before, edit=_scale, backward=_loss_in_bf16, make=lambda: make_net().bfloat16()),
    "edit: absolute loss": partial(_edited_before, edit=_scale, backward=_absolute, make=_WideAndDeep),
    "edit: assigned": partial(_edited_before, edit=_clip, backward=_assigning),
    "edit: by hooks before": partial(_clipped_by_hooks, is_after=False),
    "edit: by hooks after": partial(_clipped_by_hooks, is_after=True),
    "edit: where a rank skips": _clips_where_it_skips,
    "edit: in local steps": _local_steps,
    "edit: between two calls": _two_calls_of_one_layer,
    "edit: sparse": partial(_edited_before, edit=_scale_sparse, make=Words),
    "one batch, hardly learning": partial(_repeated, count=1, learning_rate=1e-9),
    "seven batches, not learning": partial(_repeated, count=7, learning_rate=0.0),
    "a scaler": partial(_scaled, is_passed=True),
    "a scaler that was not passed": partial(_scaled, is_passed=False),
    "two optimizers and one scaler": _two_optimizers_and_one_scaler,
}
