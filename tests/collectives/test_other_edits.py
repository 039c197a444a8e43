"""Changes of gradients between backward and the call that are neither a clip nor an unscaling are silent."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers import logged_warnings
from tests.helpers.edited_loop import STEPS, Loop, Told, clip_norm, do_nothing
from tests.helpers.ranks import run_ranks
from tests.helpers.small_models import Words


def _scale_by_a_constant(loop: Loop) -> None:
    torch._foreach_mul_(loop.grads, 0.5)


def _add_noise(loop: Loop) -> None:
    for grad in loop.grads:
        grad.add_(torch.randn_like(grad), alpha=0.01)


def _take_signs(loop: Loop) -> None:
    """As for a vote: the greatest element is always 1."""
    for grad in loop.grads:
        grad[grad.abs() < grad.abs().mean()] = 0
        grad.sign_()


def _drop(loop: Loop) -> None:
    loop.optimizer.zero_grad(set_to_none=False)


def _accumulate(loop: Loop) -> None:
    loop.backward()


def _clip_loosely(loop: Loop) -> None:
    clip_grad_norm_(loop.model.parameters(), 1e6)
    clip_grad_value_(loop.model.parameters(), 1e6)


CHANGES = {
    function.__name__.strip("_").replace("_", " "): function
    for function in (_scale_by_a_constant, _add_noise, _take_signs, _drop, _accumulate, _clip_loosely)
}


def _changes(rank: int, name: str, options: dict[str, Any]) -> Told:
    return Loop(rank, options=options).run(CHANGES[name])


@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": False}], ids=["views", "copies"])
@pytest.mark.parametrize("name", CHANGES)
def test_other_changes_before_the_call_are_silent(name: str, options: dict[str, Any]) -> None:
    assert run_ranks(_changes, 2, name, options) == [[], []]


def _hooked(rank: int) -> Told:
    """A hook of the user clips every gradient, after the hooks of the wrapper."""
    loop = Loop(rank)

    def clip(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(1e-3 / parameter.grad.norm())

    for parameter in loop.model.parameters():
        parameter.register_post_accumulate_grad_hook(clip)
    return loop.run(do_nothing)


def _hooked_before(rank: int) -> Told:
    loop = Loop(rank)
    for parameter in loop.model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-1e-4, 1e-4))
    return loop.run(do_nothing)


def _keeps_views(rank: int) -> Told:
    return Loop(rank, keeps_views=True).run(do_nothing, clip_norm)


def _hardly_moves(rank: int) -> Told:
    """The same data in every step, a tiny learning rate and a constant factor: norms hardly differ."""
    loop = Loop(rank, learning_rate=1e-7)
    data = loop.data()
    loop.data = lambda: data  # type: ignore[method-assign]
    return loop.run(_scale_by_a_constant)


def _stands_still(rank: int) -> Told:
    loop = Loop(rank, learning_rate=0.0)
    data = loop.data()
    loop.data = lambda: data  # type: ignore[method-assign]
    return loop.run(_scale_by_a_constant)


def _absolute_loss(rank: int) -> Told:
    """The gradient of the last bias is a sum of signs, and the greatest."""
    loop = Loop(rank)

    def backward() -> None:
        loop.scaler.scale((loop.model(loop.data()) + 100).abs().mean()).backward()

    loop.backward = backward  # type: ignore[method-assign]
    return loop.run(_scale_by_a_constant)


def _assigned(rank: int) -> Told:
    """Gradients of a function transform, clipped and assigned by hand."""
    loop = Loop(rank)

    def backward() -> None:
        module = loop.model.module
        parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
        data = loop.data()

        def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(module, values, (data,)).square().mean()

        grads = torch.func.grad(loss)(parameters)
        for name, parameter in module.named_parameters():
            parameter.grad = grads[name]
        loop.scaler.scale(torch.ones(()))  # as a scaler in use

    loop.backward = backward  # type: ignore[method-assign]
    return loop.run(clip_norm)


def _skips(rank: int) -> Told:
    """A rank that takes no part clips; in another step its gradients count."""
    loop = Loop(rank)
    told: Told = []
    for call in range(1, STEPS + 1):
        loop.backward()
        is_out = rank == call % 2
        if is_out:
            clip_norm(loop)
        loop.model.all_reduce(skip=is_out)
        told += [(call, text) for text in logged_warnings.take()]
        loop.step()
    return told


def _local_steps(rank: int) -> Told:
    """Steps inside no_sync() clip as they like."""
    loop = Loop(rank, Checks(divergence="ignore"))
    told: Told = []
    for call in range(1, STEPS + 1):
        with loop.model.no_sync():
            loop.backward()
            clip_norm(loop)
            loop.step()
        with loop.model.no_sync():
            loop.backward()
        loop.backward()
        loop.model.all_reduce()
        told += [(call, text) for text in logged_warnings.take()]
        loop.step()
    return told


def _micro_batches(rank: int) -> Told:
    """Micro-batches in a tree, and a clip after the call."""
    loop = Loop(rank, options={"reproducible": True})
    told: Told = []
    for call in range(1, STEPS + 1):
        with loop.model.no_sync():
            loop.backward()
        loop.backward()
        loop.model.all_reduce(sample_size=12)
        told += [(call, text) for text in logged_warnings.take()]
        clip_norm(loop)
        loop.step()
    return told


def _shared_parameters(rank: int) -> Told:
    """Two wrappers reduce one layer; the gradients are clipped after the first call."""
    loop = Loop(rank)
    second = LegacyDistributedDataParallel(loop.model.module, checks=Checks(same_data="allow"))
    return loop.run(do_nothing, lambda each: (clip_norm(each), second.all_reduce()))


def _sparse(rank: int) -> Told:
    loop = Loop(rank, net=Words)
    loop.scaler = torch.amp.GradScaler("cpu", enabled=False)
    return loop.run(_scale_by_a_constant)


SILENT = (
    _hooked,
    _hooked_before,
    _keeps_views,
    _hardly_moves,
    _stands_still,
    _absolute_loss,
    _assigned,
    _skips,
    _local_steps,
    _micro_batches,
    _shared_parameters,
    _sparse,
)


@pytest.mark.parametrize("scene", SILENT, ids=lambda scene: scene.__name__.strip("_"))
def test_a_healthy_way_to_change_gradients_is_silent(scene: Callable[[int], Told]) -> None:
    assert run_ranks(scene, 2) == [[], []]


def _compiled(rank: int) -> Told:
    loop = Loop(rank)
    eager = loop.backward

    def backward() -> None:
        with warnings.catch_warnings(), torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            warnings.simplefilter("ignore")  # torch's own, about the tensors that it looks at
            eager()

    loop.backward = backward  # type: ignore[method-assign]
    return loop.run(_scale_by_a_constant)


@pytest.mark.thorough
def test_a_compiled_backward_is_silent() -> None:
    assert run_ranks(_compiled, 2, timeout_seconds=120) == [[], []]
