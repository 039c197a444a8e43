"""What does this rank hold that replicas should share? Parameters, buffers, gradients, optimizers."""

import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from legacy_ddp._layout import check_dense, distinct, fingerprint
from legacy_ddp._replicas.digest import digest, digest_all, digest_words

Fact = tuple[str, torch.Tensor | str]
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
        Holding("buffers", f"buffer {item.name!r}", _comparable(item.tensor))
        for item in found
        if not any(fnmatchcase(name, pattern) for name in item.names for pattern in local)
    ]


def gradients(module: nn.Module, ignore: Iterable[str]) -> list[Holding]:
    """The gradient of every parameter, ``none`` for one without."""
    found = distinct(module.named_parameters(remove_duplicate=False), frozenset(ignore))
    return [
        Holding("gradients", f"gradient of {item.name!r}", "none" if item.tensor.grad is None else item.tensor.grad)
        for item in found
        if item.tensor.requires_grad
    ]


def optimizers(
    several: Sequence[torch.optim.Optimizer],
    module: nn.Module,
    settings_of: Callable[[torch.optim.Optimizer], Iterable[Fact]] | None = None,
) -> list[Holding]:
    """Hyperparameters of every group, the state of every parameter, and the parameters that are not the module's.

    ``settings_of``: where to take hyperparameters from; None: as they are now.
    """
    names = {id(item.tensor): item.name for item in distinct(module.named_parameters(remove_duplicate=False))}
    found = []
    for index, optimizer in enumerate(several):
        prefix = f"optimizer {index}: " if len(several) > 1 else ""
        facts = [*(settings_of or settings)(optimizer), *_states(optimizer, names)]
        found += [Holding("optimizer", prefix + name, value) for name, value in facts]
    return sorted(found, key=lambda holding: holding.name)  # registration order does not matter


def settings(optimizer: torch.optim.Optimizer) -> Iterator[Fact]:
    """The hyperparameters of every parameter group."""
    for index, group in enumerate(optimizer.param_groups):
        for key in sorted(set(group) - {"params", "param_names"}):  # which say nothing but an order
            yield from _flatten(f"{key} of parameter group {index}", group[key])


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
    return fingerprint(json.dumps([bits, [(holding.name, _in_words(holding.value)) for holding in holdings]]).encode())


def rows_of(holdings: Sequence[Holding]) -> dict[str, str]:
    """Each thing and its value in words, for a tensor: what it is, and its digest."""
    tensors = {index: item.value for index, item in enumerate(holdings) if isinstance(item.value, torch.Tensor)}
    digests = dict(zip(tensors, digest_words(list(tensors.values())), strict=True))
    return {
        item.name: f"{_in_words(item.value)} {digests[index] % 2**64:016x}" if index in digests else str(item.value)
        for index, item in enumerate(holdings)
    }


def word_of_generators(module: nn.Module) -> int:
    """One number for the random generators that this process draws from: torch's, Python's and NumPy's global one."""
    states: list[object] = [digest(torch.get_rng_state()), random.getstate()]
    devices = {parameter.device for parameter in module.parameters() if parameter.is_cuda}
    states += [digest(torch.cuda.get_rng_state(device)) for device in devices]
    if numpy := sys.modules.get("numpy"):
        _, key, *rest = numpy.random.get_state()
        states.append((key.tobytes(), rest))
    return fingerprint(repr(states).encode())


def _states(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Iterator[Fact]:
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            name = repr(names.get(id(parameter), f"parameter {position} of group {index}"))
            if id(parameter) not in names:  # a copy in another precision, for instance
                yield f"weights of {name}", parameter
            state = optimizer.state.get(parameter, {})
            for key in sorted(state, key=str) if isinstance(state, Mapping) else ():
                yield from _flatten(f"{key} of {name}", state[key])


def _flatten(name: str, value: object) -> Iterator[Fact]:
    """What can be compared inside ``value``; functions and other objects cannot."""
    if isinstance(value, torch.Tensor):
        yield name, _comparable(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _flatten(f"{key} in {name}", value[key])
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _flatten(f"{index} in {name}", item)
    elif value is None or isinstance(value, bool | int | float | str):
        yield name, repr(value)


def _comparable(tensor: torch.Tensor) -> torch.Tensor | str:
    """The tensor, or if its bits cannot be digested what it is."""
    if tensor.is_quantized or tensor.is_meta or tensor.layout not in (torch.strided, torch.sparse_coo):
        return f"{tensor.dtype} {tuple(tensor.shape)} {tensor.layout}, not compared"
    return tensor


def _in_words(value: torch.Tensor | str) -> str:
    if isinstance(value, str):
        return value
    place = "" if value.device.type == "cpu" else f" on {value.device.type}"
    return (
        f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}{place}{' sparse' if value.is_sparse else ''}"
    )
