"""Items that replicas should share, as this rank holds them: parameters, buffers, gradients, optimizers."""

import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from torch import nn

from legacy_ddp._buckets.layout import Named, check_dense, distinct, fingerprint
from legacy_ddp._replicas.digest import digest_all, digest_each, is_digestible
from legacy_ddp._replicas.element_pair import format_element

Fact = tuple[str, torch.Tensor | str]
NONE = "none"  # in place of a gradient
# Optimizer entries that are neither state nor hyperparameters.
MEMBERSHIP = "parameter group"
WEIGHTS = "weights"
EARLIER_STATE = "state before the last step"
Kind = Literal["parameters", "buffers", "gradients", "optimizer"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class StateItem:
    """A tensor, or a setting as text. ``kind`` is in ``KINDS``; ``name`` is the name for the user."""

    kind: str
    name: str
    value: torch.Tensor | str


def parameters(module: nn.Module, ignore: Iterable[str]) -> list[StateItem]:
    """Every parameter except the names in ``ignore``, including frozen parameters, sorted by name.

    Raises:
        ValueError: a parameter has no plain values (see :func:`check_dense`).
    """
    found = distinct(module.named_parameters(remove_duplicate=False), frozenset(ignore))
    for item in found:
        check_dense(item, kind="parameter")
    return [StateItem("parameters", f"parameter {item.name!r}", item.tensor) for item in found]


def buffers(module: nn.Module, ignore: Iterable[str], local: Sequence[str]) -> list[StateItem]:
    """Every buffer except the names in ``ignore`` and the names that a name or pattern in ``local`` matches."""
    return buffer_items(named_buffers(module, ignore, local))


def named_buffers(module: nn.Module, ignore: Iterable[str], local: Sequence[str]) -> list[Named]:
    """The buffers of :func:`buffers` with all their names, sorted."""
    found = distinct(module.named_buffers(remove_duplicate=False), frozenset(ignore))
    return [item for item in found if not any(fnmatchcase(name, pattern) for name in item.names for pattern in local)]


def buffer_items(named: Iterable[Named]) -> list[StateItem]:
    """An item for each buffer."""
    return [StateItem("buffers", f"buffer {item.name!r}", comparable(item.tensor)) for item in named]


def gradients(named: Mapping[str, torch.Tensor | None]) -> list[StateItem]:
    """The given gradients by parameter name, sorted; the value is ``NONE`` for a parameter without a gradient."""
    return [
        StateItem("gradients", f"gradient of {name!r}", NONE if grad is None else grad)
        for name, grad in sorted(named.items())
    ]


def gradients_in(module: nn.Module, ignore: Iterable[str]) -> list[StateItem]:
    """The gradient of every trainable parameter."""
    found = distinct(module.named_parameters(remove_duplicate=False), frozenset(ignore))
    return gradients({item.name: item.tensor.grad for item in found if item.tensor.requires_grad})


def optimizer_items(
    optimizers: Sequence[torch.optim.Optimizer],
    module: nn.Module,
    settings_of: Callable[[torch.optim.Optimizer], Iterable[Fact]] | None = None,
) -> list[StateItem]:
    """Hyperparameters and state: all items of :func:`optimizer_settings` and :func:`optimizer_states`."""
    # Registration order does not matter.
    found = [*optimizer_settings(optimizers, settings_of), *optimizer_states(optimizers, module)]
    return sorted(found, key=lambda item: item.name)


def optimizer_settings(
    optimizers: Sequence[torch.optim.Optimizer],
    settings_of: Callable[[torch.optim.Optimizer], Iterable[Fact]] | None = None,
) -> list[StateItem]:
    """Hyperparameters of every group, from ``settings_of``, by default the present hyperparameters."""
    return _items_of(optimizers, settings_of or settings)


def optimizer_states(optimizers: Sequence[torch.optim.Optimizer], module: nn.Module) -> list[StateItem]:
    """The state of every parameter, and the parameters in the optimizers that are not in the module."""
    names = {id(item.tensor): item.name for item in distinct(module.named_parameters(remove_duplicate=False))}
    return _items_of(optimizers, lambda optimizer: _states(optimizer, names))


def settings(optimizer: torch.optim.Optimizer) -> Iterator[Fact]:
    """The hyperparameters of every parameter group."""
    yield from settings_in(optimizer.param_groups)


def settings_in(parameter_groups: Iterable[Mapping[str, Any]]) -> Iterator[Fact]:
    """The hyperparameters in ``parameter_groups`` of an optimizer."""
    for index, group in enumerate(parameter_groups):
        for key in sorted(set(group) - {"params", "param_names"}):  # these two hold only an order
            yield from flatten(f"{key} of parameter group {index}", group[key])


def check_local_buffers(module: nn.Module, local: Sequence[str]) -> None:
    """Refuse a name that is not a buffer of ``module``. A pattern may match no buffer, so models can share patterns.

    Raises:
        ValueError: lists the unknown names.
    """
    names = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    if unknown := [name for name in local if name not in names and not set(name) & set("*?[")]:
        expected = f"expected some of {names}" if names else "and the module has no buffers; leave local_buffers out"
        raise ValueError(f"local_buffers names what the module does not have: got {unknown}, {expected}")


def digest_items(items: Sequence[StateItem]) -> int:
    """A 64-bit digest of all items, as cheap as possible: equal on two ranks that hold equal items."""
    bits = digest_all([item.value for item in items if isinstance(item.value, torch.Tensor)])
    return fingerprint(json.dumps([bits, [(item.name, describe_value(item.value)) for item in items]]).encode())


def describe_items(items: Sequence[StateItem]) -> dict[str, str]:
    """The text of each item by name; of a tensor, its type and its digest; of a scalar in an optimizer, its number."""
    tensors = {index: item.value for index, item in enumerate(items) if isinstance(item.value, torch.Tensor)}
    scalars = {index for index, tensor in tensors.items() if items[index].kind == "optimizer" and _is_scalar(tensor)}
    contents = {index: format_element(tensors[index]) for index in scalars}
    hashed = {index: tensor for index, tensor in tensors.items() if index not in scalars}
    digests = zip(hashed, digest_each(hashed.values()), strict=True)
    contents |= {index: f"{digest % 2**64:016x}" for index, digest in digests}
    return {
        item.name: describe_value(item.value) + (f" {contents[index]}" if index in contents else "")
        for index, item in enumerate(items)
    }


def digest_generators(module: nn.Module) -> int:
    """A digest of the random generators of this process: the generators of torch, of Python, and NumPy's global."""
    states: list[object] = [digest_torch_generators(module), random.getstate()]
    if numpy := sys.modules.get("numpy"):
        _, key, *rest = numpy.random.get_state()
        states.append((key.tobytes(), rest))
    return fingerprint(repr(states).encode())


def digest_torch_generators(module: nn.Module) -> int:
    """A digest of torch's generators, of the CPU and of the devices of ``module``. Dropout uses these generators."""
    devices = sorted({parameter.device for parameter in module.parameters() if parameter.is_cuda}, key=str)
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    return fingerprint(repr(digest_each(states)).encode())


def _items_of(
    optimizers: Sequence[torch.optim.Optimizer], facts_of: Callable[[torch.optim.Optimizer], Iterable[Fact]]
) -> list[StateItem]:
    found = []
    for index, optimizer in enumerate(optimizers):
        prefix = f"optimizer {index}: " if len(optimizers) > 1 else ""
        found += [StateItem("optimizer", prefix + name, value) for name, value in facts_of(optimizer)]
    return sorted(found, key=lambda item: item.name)


def _states(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[Fact]:
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = repr(names.get(id(parameter), f"parameter {position} of group {index}"))
            if id(parameter) not in names:  # a copy in another precision, for instance
                yield f"{WEIGHTS} of {name}", parameter
            state = optimizer.state.get(parameter, {})
            for key in sorted(state, key=str) if isinstance(state, Mapping) else ():
                yield from flatten(f"{key} of {name}", state[key])


def flatten(name: str, value: object) -> Iterator[Fact]:
    """The comparable values inside ``value``. Functions and other objects are left out."""
    if isinstance(value, torch.Tensor):
        yield name, comparable(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from flatten(f"{key} in {name}", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from flatten(f"{index} in {name}", item)
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, repr(value)


def comparable(tensor: torch.Tensor) -> torch.Tensor | str:
    """The tensor, or its type as text if its bits cannot be digested."""
    if is_digestible(tensor):
        return tensor
    return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}, not compared"


def _is_scalar(tensor: torch.Tensor) -> bool:
    return tensor.ndim == 0 and tensor.layout is torch.strided


def describe_value(value: torch.Tensor | str) -> str:
    """The text of a setting; of a tensor, its type and its device unless that is the CPU."""
    if isinstance(value, str):
        return value
    return format_type(value, "" if value.device.type == "cpu" else f" on {value.device.type}")


def format_type(tensor: torch.Tensor, device: str = "") -> str:
    """Dtype, shape and layout, with the text ``device`` before the layout."""
    layout = " sparse" if tensor.is_sparse else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}{device}{layout}"
