"""A small training with a fault planted on one rank in one step, recorded with its operations."""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp.debug import Recorder

STEPS, STEP = 3, 2  # the number of steps, and the step with operations and the fault
FAULTY_RANK = 1
WIDE = 200_000  # elements of a sum that torch splits between threads


class Kernel:
    """The product of a custom operation. ``flips``: the number of calls that still return a flipped bit."""

    flips = 0


@torch.library.custom_op("planted::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = x @ weight
    if Kernel.flips > 0:
        Kernel.flips -= 1
        out.view(-1).view(torch.int32)[5] ^= 1 << 22
    return out


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = ctx.saved_tensors
    return product(gradient, weight.t()), product(x.t(), gradient)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


product.register_autograd(_backward, setup_context=_setup)


class Product(nn.Module):
    """A layer on the custom operation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(x.float(), self.weight)  # float(): under autocast x is bfloat16


class Scale(nn.Module):
    """Multiplies with a buffer. ``kept``: another tensor in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.ones(16))
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self.factor if self.kept is None else self.kept)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.body = nn.Sequential(Product(), nn.Tanh(), nn.Dropout(0.2))
        self.scale = Scale()
        self.last = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.scale(self.body(self.first(x))))
        return out


class WideSum(nn.Module):
    """A sum over so many elements that threads share it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x.mean()).sum()


class Rows(nn.Module):
    """Rows of a table; the gradient adds many rows into few."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(10, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.randint(0, 10, (1_000_000,), generator=torch.Generator().manual_seed(3))
        return (self.table[rows, 0] * torch.linspace(-1, 1, len(rows)) * x.mean()).sum()


Fault = Callable[[nn.Module], AbstractContextManager[Any] | None]


def train(
    rank: int,
    folder: Path,
    *,
    make: Callable[[], nn.Module] = Net,
    fault: Fault | None = None,
    seed: int = 0,
    threads: int = 1,
    sizes: tuple[int, ...] = (6, 6),
    micro_batches: int = 1,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None,
    operations: Collection[int] = range(STEP, STEP + 1),
) -> None:
    """Three steps; ``fault``: called in the second step of the faulty rank, for a context around forward and backward.

    ``threads``: of the faulty rank. ``sizes``: of the batches of the ranks, in turn.
    """
    Kernel.flips = 0
    torch.set_num_threads(threads if rank == FAULTY_RANK else 1)
    torch.manual_seed(0)
    model = LegacyDistributedDataParallel(make(), checks=Checks(divergence="ignore", local_buffers=("*.running_*",)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(seed + 1 + rank)
    loss = loss or (lambda model, x: model(x).square().sum())
    with Recorder(model, folder, optimizer=optimizer, operations=operations):
        for step in range(1, STEPS + 1):
            optimizer.zero_grad()
            planted = fault(model.module) if fault and (rank, step) == (FAULTY_RANK, STEP) else None
            with planted or nullcontext():
                for part in range(micro_batches):
                    drawn = torch.Generator().manual_seed(100 * step + 10 * part + rank)
                    loss(model, torch.randn(sizes[rank % len(sizes)], 8, generator=drawn)).backward()
            model.all_reduce()
            optimizer.step()
            Kernel.flips = 0
            model.train()
    torch.set_num_threads(1)


def flip_once(_: nn.Module) -> None:
    Kernel.flips = 1


def flip_always(_: nn.Module) -> None:
    Kernel.flips = 1_000_000


def flip_in_backward(module: nn.Module) -> None:
    """The first product is right: the fault begins in the backward pass."""

    def begin(*_: object) -> None:
        Kernel.flips = 1
        handle.remove()

    handle = module.last.register_forward_hook(begin)


def autocast(_: nn.Module) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def eval_mode(module: nn.Module) -> None:
    module.body[2].eval()


def stale_buffer(module: nn.Module) -> None:
    module.scale.kept = module.scale.factor * 1.5


def extra_operation(module: nn.Module) -> None:
    """An operation in place, in a hook."""
    handle = module.first.register_forward_hook(lambda _, __, out: (handle.remove(), out.mul_(1.25))[1])


def harmless_operation(module: nn.Module) -> None:
    handle = module.body[1].register_forward_hook(lambda _, __, out: (handle.remove(), out.detach().clone(), None)[2])


@contextmanager
def scaled_gradients(module: nn.Module) -> Iterator[None]:
    """An edit of all gradients after the backward pass."""
    yield
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


@contextmanager
def copied_weight(module: nn.Module) -> Iterator[None]:
    """A layer reads a copy of its weight, with equal bits."""
    kept = module.last.weight.detach().clone()
    module.last.forward = lambda x: nn.functional.linear(x, kept, module.last.bias)
    try:
        yield
    finally:
        del module.last.forward


def _in_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def write_to_activation(module: nn.Module) -> None:
    """A second thread writes to the output of a layer, before the next layer reads it."""

    def write(_: nn.Module, __: object, out: torch.Tensor) -> None:
        handle.remove()
        _in_thread(lambda: out.detach()[0].add_(1.0))

    handle = module.first.register_forward_hook(write)


def write_to_weight(module: nn.Module) -> None:
    """A second thread writes to a weight between its forward and its backward pass."""

    def write(*_: object) -> None:
        handle.remove()
        _in_thread(lambda: module.body[0].weight.data[0].add_(1.0))

    handle = module.last.register_forward_hook(write)
