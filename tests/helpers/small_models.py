"""A wrapper of two weights, and short ways to step it and to hear what it says."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel

Said = tuple[str, str] | None
# Arguments of wrappers that count backward passes and keep gradients in different ways.
KINDS: dict[str, dict[str, Any]] = {
    "info": {},
    "off": {"checks": "off"},
    "detail": {"checks": "detail"},
    "without views": {"gradient_as_bucket_view": False},
    "reproducible": {"reproducible": True},
}


def wrap(**arguments: Any) -> LegacyDistributedDataParallel:
    return LegacyDistributedDataParallel(nn.Linear(2, 1, bias=False), **arguments)


def tanh_net() -> nn.Sequential:
    """Two layers, the same on every rank."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))


def wrap_on_device(
    group: Any = None, layer: nn.Module | None = None, **arguments: Any
) -> LegacyDistributedDataParallel:
    """Of two layers with ``layer`` between them. ``group``: of the simulated device, None for the default device."""
    torch.manual_seed(0)
    with torch.device("cpu"):
        module = nn.Sequential(nn.Linear(3, 4), layer or nn.Dropout(0.5), nn.Linear(4, 2))
    device = torch.get_default_device() if group is None else "sim"
    return LegacyDistributedDataParallel(module.to(device), process_group=group, **arguments)


def backward_on_device(model: nn.Module, rank: int, *, first: float = 1.0) -> None:
    """A backward of :func:`wrap_on_device` on a batch of this rank. ``first``: its first element."""
    batch = torch.full((4, 3), rank + 1.0)
    batch[0, 0] = first
    model(batch.to(next(model.parameters()).device)).sum().backward()


def add_gradients(model: nn.Module, value: float) -> None:
    """Add ``value`` to every element of every trainable parameter's gradient."""
    torch.stack([(p * value).sum() for p in model.parameters() if p.requires_grad]).sum().backward()


def gradient_values(model: nn.Module) -> dict[str, float | None]:
    """The value that fills each gradient."""
    found: dict[str, float | None] = {}
    for name, parameter in model.named_parameters():
        values = set() if parameter.grad is None else set(parameter.grad.flatten().tolist())
        assert len(values) <= 1
        found[name.removeprefix("module.")] = values.pop() if values else None
    return found


def step(model: LegacyDistributedDataParallel, value: float, **arguments: Any) -> float | None:
    """One step on fresh gradients of ``value``; what the first of them is afterwards."""
    model.zero_grad()
    add_gradients(model, value)
    model.all_reduce(**arguments)
    return next(iter(gradient_values(model).values()))


def transport_line(model: nn.Module) -> str:
    """What ``print(model)`` says of the transport."""
    (line,) = [text.strip() for text in repr(model).splitlines() if "transport:" in text]
    return line


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Said:
    """Type and text of what ``function`` raises."""
    try:
        function(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 - the test looks at its type
        return type(error).__name__, str(error)
    return None


class Net(nn.Module):
    """A few kinds of parameters, one of them frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 2)
        self.head = nn.Linear(4, 4)
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)


class Words(nn.Module):
    """A sparse embedding of words made from numbers, and a linear layer; the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.last = nn.Embedding(50, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.words((x.abs() * 10).long().clamp(max=49)).mean(1))
