"""Tensors and other arguments of an operation as text, and the names of parameters."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._replicas.state import format_type


class Descriptions:
    """Dtype and shape, and layout, of tensors as text."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[str, str]] = {}

    def of(self, tensor: torch.Tensor) -> tuple[str, str]:
        """``kind`` and ``layout`` of :class:`Value`."""
        if tensor.layout is not torch.strided or internals.has_own_dispatch(tensor) or tensor.is_nested:
            return _foreign(tensor)
        key = tensor.dtype, tensor.shape, tensor.stride(), tensor.device.type, tensor.is_conj(), tensor.is_neg()
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = format_type(tensor), ", ".join(_layout(tensor))
        return found


def _layout(tensor: torch.Tensor) -> Iterator[str]:
    if not tensor.is_contiguous():
        yield f"strides {tensor.stride()}"
    if tensor.device.type != "cpu":
        yield f"on {tensor.device.type}"
    if tensor.is_conj():
        yield "conjugated"
    if tensor.is_neg():
        yield "negated"


def _foreign(tensor: torch.Tensor) -> tuple[str, str]:
    """A sparse tensor, or a tensor of a class with operations of its own, which need not answer every question."""
    name = type(tensor).__name__
    try:
        kind = format_type(tensor)
    except Exception:  # noqa: BLE001 - a class of a user may raise anything
        return name, ""
    layout = "" if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")
    return kind, layout if type(tensor) in (torch.Tensor, nn.Parameter) else f"{name} {layout}".strip()


class ParameterNames:
    """Names of the parameters and buffers of a module, by memory."""

    def __init__(self, module: nn.Module) -> None:
        self._names: dict[int, list[tuple[int, int, str]]] = {}
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            key = internals.storage_key(tensor)
            if key is not None and not internals.has_own_dispatch(tensor):
                self._names.setdefault(key, []).append((*_span(tensor), name))

    def of(self, tensor: torch.Tensor) -> list[str]:
        """The names of parameters and buffers that share memory with the tensor."""
        key = internals.storage_key(tensor)
        held = self._names.get(key, ()) if key is not None else ()
        if len(held) < 2:
            return [name for _, _, name in held]
        first, last = _span(tensor)
        return [name for begin, end, name in held if begin <= last and first <= end]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The first and the last byte of the tensor's elements in its storage."""
    begin = int(tensor.storage_offset()) * tensor.itemsize
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + int(last + 1) * tensor.itemsize - 1


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """The tensors of an argument or a result, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)


def setting(value: object) -> str:
    """An argument without tensors as text, equal from run to run. Objects without such a text give their type."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(setting, value))}]"
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr(value)
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return str(value).removeprefix("torch.")
    if isinstance(value, torch.device):
        return value.type
    return type(value).__name__


def is_setting(value: Any) -> bool:
    """Whether an argument has anything but tensors."""
    if isinstance(value, list | tuple):
        return not value or any(map(is_setting, value))
    return not isinstance(value, torch.Tensor)
