"""Faults in the computation of a rank, as a cross-check sees them, each with a twin without fault."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp.debug import CrossCheckReport, cross_check
from tests.helpers.ranks import run_ranks
from tests.helpers.replica_scenes import SharedOutcomes

Kernel = Callable[[torch.Tensor], torch.Tensor]


def seen_by_all(scenes: Mapping[str, Sequence[int]], world_size: int) -> SharedOutcomes[CrossCheckReport]:
    """The reports of all ranks. ``scenes``: with the guilty ranks of each."""
    return SharedOutcomes(run_ranks(partial(_observe_all, dict(scenes)), world_size))


def _observe_all(scenes: Mapping[str, Sequence[int]], rank: int) -> dict[str, CrossCheckReport]:
    return {name: SCENES[name](rank in guilty, rank) for name, guilty in scenes.items()}


KERNELS = SimpleNamespace(present=lambda tensor: tensor * 2)  # of the custom operation of the tests


def kernel_replaced(kernel: Kernel) -> AbstractContextManager[Any]:
    return patch.object(KERNELS, "present", kernel)


@torch.library.custom_op("cross_faults::double", mutates_args=())
def double(tensor: torch.Tensor) -> torch.Tensor:
    return KERNELS.present(tensor)


double.register_autograd(lambda _, gradient: gradient * 2)


class Double(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return double(inputs)


class Net(nn.Module):
    """``first`` → ``middle`` → ``drop`` → ``last``."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle = nn.Linear(6, 16), middle
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(16, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(self.middle(self.first(inputs))))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.cross_entropy(model(batch["inputs"]), batch["targets"])


def batch_of(rank: int, rows: int = 8) -> dict[str, torch.Tensor]:
    """Another batch on every rank, also of another size; the generator afterwards is in a state of the rank's own."""
    torch.manual_seed(100 + rank)
    return {"inputs": torch.randn(rows + rank, 6), "targets": torch.randint(3, (rows + rank,))}


def check(
    net: nn.Module, rank: int, run: Callable[[nn.Module, Any], torch.Tensor] = loss_of, **arguments: Any
) -> CrossCheckReport:
    model = LegacyDistributedDataParallel(net)
    return cross_check(model, run, batch_of(rank), **arguments)


def flip(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with a flipped bit, the bit 20 of an element."""
    tensor = tensor.clone()
    tensor.view(torch.int32)[1, 2] ^= 1 << 20
    return tensor


def _kernel_always(make: Callable[[], nn.Module], guilty: bool, rank: int) -> CrossCheckReport:
    with kernel_replaced(lambda tensor: flip(tensor * 2) if guilty else tensor * 2):
        return check(Net(make()), rank)


def _kernel_once(guilty: bool, rank: int, *, run: int = 1, **arguments: Any) -> CrossCheckReport:
    """``run``: the number of the run with the fault, from 0."""
    calls = count()
    with kernel_replaced(lambda tensor: flip(tensor * 2) if guilty and next(calls) == run else tensor * 2):
        return check(Net(Double()), rank, **arguments)


def _kernel_of_no_order(guilty: bool, rank: int) -> CrossCheckReport:
    calls = count()
    with kernel_replaced(lambda tensor: tensor * (2 + next(calls) * 0.001 * guilty)):
        return check(Net(Double()), rank)


class _NotCapturable(nn.Module):
    """Refuses dispatch modes, as some operations of torch do."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if _get_current_dispatch_mode() is not None:
            raise NotImplementedError("no support for dispatch modes")
        return double(inputs)


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> torch.Tensor:
        return double(gradient) * 0.5


class BackwardDouble(nn.Module):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return _WrongGradient.apply(inputs)


def _patched_function(guilty: bool, rank: int) -> CrossCheckReport:
    gelu = functional.gelu
    other = lambda inputs, **_: gelu(inputs, approximate="tanh")  # noqa: E731
    with patch.object(functional, "gelu", other if guilty else gelu):
        return check(Net(nn.GELU()), rank)


class _ManySums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.randn(3_000_001, generator=torch.Generator().manual_seed(1)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.numbers.sum()


def _threads(guilty: bool, rank: int) -> CrossCheckReport:
    before = torch.get_num_threads()
    torch.set_num_threads(2 if guilty else 1)
    try:
        return check(Net(_ManySums()), rank)
    finally:
        torch.set_num_threads(before)


def _eval(guilty: bool, rank: int) -> CrossCheckReport:
    net = Net(nn.Tanh())
    net.drop.train(not guilty)
    return check(net, rank)


def _autocast(guilty: bool, rank: int) -> CrossCheckReport:
    with torch.autocast("cpu", torch.bfloat16, enabled=guilty):
        return check(Net(nn.Tanh()), rank)


def _seeded(guilty: bool, rank: int) -> CrossCheckReport:
    def run(model: nn.Module, batch: Any) -> torch.Tensor:
        torch.manual_seed(int(guilty))
        return loss_of(model, batch)

    return check(Net(nn.Tanh()), rank, run)


class Cached(nn.Module):
    """Multiplies by a tensor that is no buffer, as code with a cache of its own does."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.cache = torch.full((16,), value)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs * self.cache


class _WrittenByAThread(nn.Module):
    """Another thread writes to the activation, unseen by torch."""

    def __init__(self, value: float | None) -> None:
        super().__init__()
        self.value = value

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs.tanh()
        memory = outputs.detach().numpy()

        def write() -> None:
            memory[1, 2] = memory[1, 2] if self.value is None else self.value

        thread = threading.Thread(target=write)
        thread.start()
        thread.join()
        return outputs.exp()


class _Extra(nn.Module):
    def __init__(self, has_extra: bool) -> None:
        super().__init__()
        self.has_extra = has_extra

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (inputs.clamp(max=0.5) if self.has_extra else inputs).tanh()


class ManyModules(nn.Module):
    """Tied weights, sparse gradients, unused and frozen parameters, a recurrent layer, both kinds of checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        self.down.weight = self.up.weight
        self.table, self.unused = nn.Embedding(5, 16, sparse=True), nn.Linear(1, 1)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.gru = nn.GRU(4, 4, batch_first=True, dropout=0.1, num_layers=2)
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Tanh())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs[:, 0].detach().abs().mul(3).long().clamp(max=4)  # some of them twice
        hidden = self.frozen(self.down(self.up(inputs))) + self.table(rows)
        hidden = self.gru(hidden.view(-1, 4, 4))[0].reshape(-1, 16)
        return checkpoint(self.inner, checkpoint(self.inner, hidden, use_reentrant=False), use_reentrant=True)


def _trained_batch_norm(guilty: bool, rank: int) -> CrossCheckReport:
    """Statistics differ between ranks, and decide the result in eval mode."""
    net = Net(nn.BatchNorm1d(16))
    model = LegacyDistributedDataParallel(net)
    for _ in range(3):
        loss_of(model, batch_of(rank))
    net.middle.eval()
    report = cross_check(model, loss_of, batch_of(rank))
    assert report.agrees, report
    net.middle.train()
    return cross_check(model, loss_of, batch_of(rank))


SILENT: dict[str, Callable[[bool, int], CrossCheckReport]] = {
    "BatchNorm": _trained_batch_norm,
    "modules": lambda _, rank: check(Net(ManyModules()), rank),
}
FAULTS: dict[str, Callable[[bool, int], CrossCheckReport]] = {
    "kernel": partial(_kernel_always, Double),
    "kernel once": _kernel_once,
    "kernel once, captured": partial(_kernel_once, operations=True),
    "kernel in the first run, captured": partial(_kernel_once, run=0, operations=True),
    "kernel without order": _kernel_of_no_order,
    "kernel not capturable": partial(_kernel_always, _NotCapturable),
    "kernel in backward": partial(_kernel_always, BackwardDouble),
    "patched function": _patched_function,
    "threads": _threads,
    "autocast": _autocast,
    "seeded": _seeded,
    "eval": _eval,
    "stale cache": lambda guilty, rank: check(Net(Cached(1.0 + guilty)), rank),
    "thread": lambda guilty, rank: check(Net(_WrittenByAThread(5.0 if guilty else None)), rank),
    "extra operation": lambda guilty, rank: check(Net(_Extra(guilty)), rank),
}
SCENES = {**SILENT, **FAULTS}
