"""What does this rank hold that replicas should share? Parameters, buffers, gradients, optimizers."""

import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from legacy_ddp._buckets.inventory import check_dense, distinct, fingerprint
from legacy_ddp._replicas.digest import digest_all, digest_words

Fact = tuple[str, torch.Tensor | str]
NONE = "none"  # in place of a gradient
KINDS = ("parameters", "buffers", "gradients", "optimizer")


@dataclass(frozen=True)
class Holding:
    """One thing: a tensor, or a setting in words. ``kind`` is one of ``KINDS``; ``name`` is what the user calls it."""

    kind: str
    name: str
    value: torch.Tensor | str


def parameters(module: nn.Module, ignore: Iterable[str]) -> list[Holding]:
    """Every parameter but those to ``ignore``, frozen ones, too, sorted by name.

    Raises:
        ValueError: one that has no plain values (see :func:`check_dense`).
    """
    found = distinct(module.named_parameters(remove_duplicate=False), frozenset(ignore))
    for item in found:
        check_dense(item, kind="parameter")
    return [Holding("parameters", f"parameter {item.name!r}", item.tensor) for item in found]


def buffers(module: nn.Module, ignore: Iterable[str], local: Sequence[str]) -> list[Holding]:
    """Every buffer but those to ``ignore`` and those that ``local``, a list of names and patterns, matches."""
    found = distinct(module.named_buffers(remove_duplicate=False), frozenset(ignore))
    return [
        Holding("buffers", f"buffer {item.name!r}", comparable(item.tensor))
        for item in found
        if not any(fnmatchcase(name, pattern) for name in item.names for pattern in local)
    ]


def gradients(named: Mapping[str, torch.Tensor | None]) -> list[Holding]:
    """These gradients of parameters, sorted by name; ``NONE`` for a parameter without."""
    return [
        Holding("gradients", f"gradient of {name!r}", NONE if grad is None else grad)
        for name, grad in sorted(named.items())
    ]


def gradients_in(module: nn.Module, ignore: Iterable[str]) -> list[Holding]:
    """The gradient of every trainable parameter."""
    found = distinct(module.named_parameters(remove_duplicate=False), frozenset(ignore))
    return gradients({item.name: item.tensor.grad for item in found if item.tensor.requires_grad})


def optimizers(
    several: Sequence[torch.optim.Optimizer],
    module: nn.Module,
    settings_of: Callable[[torch.optim.Optimizer], Iterable[Fact]] | None = None,
) -> list[Holding]:
    """Hyperparameters and state: all of :func:`optimizer_settings` and :func:`optimizer_states`."""
    # Registration order does not matter.
    found = [*optimizer_settings(several, settings_of), *optimizer_states(several, module)]
    return sorted(found, key=lambda holding: holding.name)


def optimizer_settings(
    several: Sequence[torch.optim.Optimizer],
    settings_of: Callable[[torch.optim.Optimizer], Iterable[Fact]] | None = None,
) -> list[Holding]:
    """Hyperparameters of every group. ``settings_of``: where to take them from; None: as they are now."""
    return _of_each(several, settings_of or settings)


def optimizer_states(several: Sequence[torch.optim.Optimizer], module: nn.Module) -> list[Holding]:
    """The state of every parameter, and the parameters that are not the module's."""
    names = {id(item.tensor): item.name for item in distinct(module.named_parameters(remove_duplicate=False))}
    return _of_each(several, lambda optimizer: _states(optimizer, names))


def settings(optimizer: torch.optim.Optimizer) -> Iterator[Fact]:
    """The hyperparameters of every parameter group."""
    for index, group in enumerate(optimizer.param_groups):
        for key in sorted(set(group) - {"params", "param_names"}):  # which say nothing but an order
            yield from flatten(f"{key} of parameter group {index}", group[key])


def check_local_buffers(module: nn.Module, local: Sequence[str]) -> None:
    """Refuse a name that no buffer of ``module`` has; a pattern may match none, so that models can share it.

    Raises:
        ValueError: with the unknown names.
    """
    names = [name for name, _ in module.named_buffers(remove_duplicate=False)]
    if unknown := [name for name in local if name not in names and not set(name) & set("*?[")]:
        raise ValueError(f"local_buffers names what the module does not have: got {unknown}, expected some of {names}")


def word_of(holdings: Sequence[Holding]) -> int:
    """One 64-bit number that is equal on two ranks if they hold the same; as cheap as that gets."""
    bits = digest_all([holding.value for holding in holdings if isinstance(holding.value, torch.Tensor)])
    return fingerprint(json.dumps([bits, [(holding.name, in_words(holding.value)) for holding in holdings]]).encode())


def rows_of(holdings: Sequence[Holding]) -> dict[str, str]:
    """Each thing and its value in words, for a tensor: what it is, and its digest."""
    tensors = {index: item.value for index, item in enumerate(holdings) if isinstance(item.value, torch.Tensor)}
    digests = dict(zip(tensors, digest_words(list(tensors.values())), strict=True))
    return {
        item.name: f"{in_words(item.value)} {digests[index] % 2**64:016x}" if index in digests else str(item.value)
        for index, item in enumerate(holdings)
    }


def word_of_generators(module: nn.Module) -> int:
    """One number for the random generators that this process draws from: torch's, Python's and NumPy's global one."""
    states: list[object] = [word_of_torch_generators(module), random.getstate()]
    if numpy := sys.modules.get("numpy"):
        _, key, *rest = numpy.random.get_state()
        states.append((key.tobytes(), rest))
    return fingerprint(repr(states).encode())


def word_of_torch_generators(module: nn.Module) -> int:
    """One number for torch's own, of the CPU and of the devices of ``module``: what dropout draws from."""
    devices = sorted({parameter.device for parameter in module.parameters() if parameter.is_cuda}, key=str)
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, devices)]
    return fingerprint(repr(digest_words(states)).encode())


def _of_each(
    several: Sequence[torch.optim.Optimizer], facts_of: Callable[[torch.optim.Optimizer], Iterable[Fact]]
) -> list[Holding]:
    found = []
    for index, optimizer in enumerate(several):
        prefix = f"optimizer {index}: " if len(several) > 1 else ""
        found += [Holding("optimizer", prefix + name, value) for name, value in facts_of(optimizer)]
    return sorted(found, key=lambda holding: holding.name)


def _states(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[Fact]:
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = repr(names.get(id(parameter), f"parameter {position} of group {index}"))
            if id(parameter) not in names:  # a copy in another precision, for instance
                yield f"weights of {name}", parameter
            state = optimizer.state.get(parameter, {})
            for key in sorted(state, key=str) if isinstance(state, Mapping) else ():
                yield from flatten(f"{key} of {name}", state[key])


def flatten(name: str, value: object) -> Iterator[Fact]:
    """What can be compared inside ``value``; functions and other objects cannot."""
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
    """The tensor, or if its bits cannot be digested what it is."""
    if tensor.is_quantized or tensor.is_meta or tensor.layout not in (torch.strided, torch.sparse_coo):
        return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}, not compared"
    return tensor


def in_words(value: torch.Tensor | str) -> str:
    if isinstance(value, str):
        return value
    place = "" if value.device.type == "cpu" else f" on {value.device.type}"
    return f"{_dtype_and_shape(value)}{place}{_layout(value)}"


def what_it_is(tensor: torch.Tensor) -> str:
    """Dtype, shape and layout, wherever it lies."""
    return _dtype_and_shape(tensor) + _layout(tensor)


def _dtype_and_shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _layout(tensor: torch.Tensor) -> str:
    return " sparse" if tensor.is_sparse else ""
