"""Names and tensors of a module or of a list as two columns, for a call in which each tensor costs microseconds."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn

_WALKS = frozenset({"named_parameters", "named_modules", "_named_members"})


class Columns(NamedTuple):
    """All names of every tensor, and the tensor of each name."""

    names: Sequence[str]
    tensors: Sequence[torch.Tensor]


def columns(named: Iterable[tuple[str, torch.Tensor]]) -> Columns:
    """The columns of named tensors. A lasting tuple per tensor would start Python's garbage collector often."""
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    for name, tensor in named:
        names.append(name)
        tensors.append(tensor)
    return Columns(names, tensors)


def parameter_columns(module: nn.Module) -> Columns:
    """The same as ``module.named_parameters(remove_duplicate=False)``, in a fifth of the time.

    Modules with a walk of their own are asked for it.
    """
    names: list[str] = []
    tensors: list[torch.Tensor | None] = []
    if not _add(module, "", names, tensors):
        return columns(module.named_parameters(remove_duplicate=False))
    present = [tensor for tensor in tensors if tensor is not None]
    if len(present) < len(tensors):
        names = [name for name, tensor in zip(names, tensors, strict=True) if tensor is not None]
    return Columns(names, present)


def _add(module: nn.Module, prefix: str, names: list[str], tensors: list[torch.Tensor | None]) -> bool:
    """Add the parameters of the module and of the modules inside; whether all modules have the usual walk."""
    own = module._parameters
    is_usual = isinstance(own, dict) and _WALKS.isdisjoint(module.__dict__)
    if not (is_usual and _has_usual_walk(type(module))):  # type: ignore[arg-type]  # a class has a hash
        return False
    if own:
        names += [prefix + name for name in own]
        tensors += own.values()
    children = module._modules.items()
    return all(child is None or _add(child, f"{prefix}{name}.", names, tensors) for name, child in children)


@lru_cache(maxsize=256)
def _has_usual_walk(kind: type[nn.Module]) -> bool:
    return all(getattr(kind, walk) is getattr(nn.Module, walk) for walk in _WALKS)
