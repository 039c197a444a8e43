"""Do modules of every kind, ways of backward, hooks and torch's functional calls end where torch DDP ends?"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers.besides_ddp import Difference, Side, State, batches, compare, loss_of, net, train, weights


class _Tied(nn.Module):
    """A language model whose embedding is its output layer, too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 12)
        self.head.weight = self.embedding.weight

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding((batch * 10).abs().long() % 12)).tanh().mean(1))


class _Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5, dtype=torch.complex64)
        self.last = nn.Linear(5, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(batch.to(torch.complex64)).abs())


class _Mixed(nn.Module):
    """Layers of three dtypes in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(6, 6, dtype=dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.float32, torch.bfloat16)
        )

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            batch = layer(batch.to(layer.weight.dtype)).tanh()
        return batch.float()


class _Lora(nn.Module):
    """A frozen layer, and beside it a trainable one of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 3).requires_grad_(False)
        self.down, self.up = nn.Linear(6, 2, bias=False), nn.Linear(2, 3, bias=False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.frozen(batch) + self.up(self.down(batch))


class _Checkpointed(nn.Module):
    """One layer in several checkpoint segments: the same twice, or two that share a weight."""

    def __init__(self, reentrant: bool, shared: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.segments = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.reentrant = reentrant
        if shared:
            self.segments[1][0].weight = self.segments[0][0].weight
        else:
            self.segments[1] = self.segments[0]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        batch = self.first(batch)
        for segment in self.segments:
            batch = checkpoint(segment, batch, use_reentrant=self.reentrant)
        return batch


def _convolutions() -> nn.Module:
    convolution = nn.Conv2d(2, 4, 2).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Unflatten(1, (2, 1, 3)), nn.ZeroPad2d(1), convolution, nn.ReLU(), nn.Flatten())


class _Branches(nn.Module):
    """Uses no branch, one of three, or all of them; the fourth is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 6)
        self.branches = nn.ModuleList(nn.Linear(6, 3) for _ in range(4))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        which = int(batch[0, 0].abs() * 10) % 5
        used = range(3) if which == 4 else [which] if which < 3 else []
        trunk = self.trunk(batch)
        return trunk.sum(1, keepdim=True) + sum(self.branches[index](trunk) for index in used)


def _normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def _loss_of_two_forwards(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return loss_of(model, batch) + model(-batch).sum(1).logsumexp(0)


def _loss_in_bf16(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss_of(model, batch).float()


def _plain(
    side: Side,
    rank: int,
    build: Callable[[], nn.Module] = net,
    *,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
    micro_batches: int = 1,
    set_to_none: bool = True,
    ours: Mapping[str, Any] = MappingProxyType({}),
    **ddp: Any,
) -> State:
    """Parameters and buffers, and the gradients of the last step. ``ours``, ``ddp``: options of the wrappers."""
    module = build()
    model = side.wrap(module, **(ours if side.ours else ddp))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.2, momentum=0.5)
    for batch in batches(rank):
        optimizer.zero_grad(set_to_none)
        if side.ours:
            model.broadcast_buffers()
        *others, last = batch.chunk(micro_batches)
        for part in others:
            with model.no_sync():
                side.backward(model, loss(model, part))
        side.backward(model, loss(model, last))
        optimizer.step()
    gradients = {name: torch.zeros(()) if p.grad is None else p.grad for name, p in module.named_parameters()}
    return {**module.state_dict(), **{f"gradient of {name}": gradient for name, gradient in gradients.items()}}


def _pruned(side: Side, rank: int) -> State:
    """Forward with other tensors in place of the parameters, made from them."""
    module = net()
    model = side.wrap(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for batch in batches(rank):
        pruned = {name: p * (p.abs() > 0.1) for name, p in model.named_parameters()}
        output = torch.func.functional_call(model, pruned, batch)
        side.backward(model, (output.tanh() - batch[:, :1]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return weights(module)


def _by_hand(side: Side, rank: int) -> State:
    """torch.autograd.grad() writes no ``.grad``: here it is written by hand; torch DDP needs backward()."""
    model = side.wrap(net())
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.2)
    for batch in batches(rank):
        loss = loss_of(model, batch)
        if side.ours:
            for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = grad
            side.meet(model)
        else:
            side.backward(model, loss)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def _hooked(side: Side, rank: int) -> State:
    """Hooks on modules and on parameters see the same, in the same number, and one may change a gradient."""
    module = net()
    model = side.wrap(module)
    seen: list[torch.Tensor] = []
    module.register_forward_hook(lambda _, __, output: seen.append(output))
    module[1].register_full_backward_hook(lambda _, __, grads: seen.append(grads[0]))
    module[2].register_full_backward_pre_hook(lambda _, grads: seen.append(grads[0]))
    module[2].weight.register_hook(lambda grad: grad * 2)
    module[2].bias.register_hook(seen.append)
    module[0].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    state = train(side, rank, model, torch.optim.SGD(model.parameters(), lr=0.2))
    return {**state, **{f"hook {index}": tensor for index, tensor in enumerate(seen)}}


_STATIC = {"static_graph": True}
LOOPS = {
    "tied weights": partial(_plain, build=_Tied),
    "complex": partial(_plain, build=_Complex),
    "channels_last": partial(_plain, build=_convolutions),
    "mixed dtypes": partial(_plain, build=_Mixed),
    "LoRA": partial(_plain, build=_Lora),
    "BatchNorm": partial(_plain, build=_normalized),
    "unused parameters": partial(_plain, build=_Branches, micro_batches=2, find_unused_parameters=True),
    "two forwards": partial(_plain, loss=_loss_of_two_forwards, **_STATIC),
    "autocast": partial(_plain, loss=_loss_in_bf16),
    "accumulation": partial(_plain, micro_batches=4),
    "accumulation, zeroed in place": partial(_plain, micro_batches=2, set_to_none=False),
    "accumulation without views": partial(_plain, micro_batches=2, ours={"gradient_as_bucket_view": False}),
    "a small buffer": partial(_plain, ours={"buffer_size": 7}),
    "functional_call": _pruned,
    "autograd.grad": _by_hand,
    "hooks": _hooked,
    "checkpointed twice": partial(_plain, build=partial(_Checkpointed, reentrant=False, shared=False)),
    "checkpointed twice, re-entrant": partial(
        _plain, build=partial(_Checkpointed, reentrant=True, shared=False), **_STATIC
    ),
    "checkpoints share a weight": partial(_plain, build=partial(_Checkpointed, reentrant=False, shared=True)),
    "re-entrant checkpoints share a weight": partial(
        _plain, build=partial(_Checkpointed, reentrant=True, shared=True), **_STATIC
    ),
}


@pytest.fixture(scope="module")
def found() -> dict[str, list[Difference]]:
    return compare(LOOPS)


@pytest.mark.parametrize("name", LOOPS)
def test_modules_of_every_kind_end_with_the_bits_of_torch_ddp(found: dict[str, list[Difference]], name: str) -> None:
    for difference in found[name]:
        assert difference.has_bits_of_ddp
        assert difference.without_the_call > 0
