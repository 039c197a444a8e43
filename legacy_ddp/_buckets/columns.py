"""Names and tensors of a module or of a list as two columns, for a call in which each tensor costs microseconds."""

from collections.abc import Iterable, Iterator, Sequence
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
    """The same as ``module.named_parameters(remove_duplicate=False)``."""
    return ParameterWalk().columns(module)


class ParameterWalk:
    """Walks over the parameters of a module. Names are made again only if they changed since the walk before.

    Keeps nothing but names alive.
    """

    def __init__(self) -> None:
        self._tree: list[object] = []
        self._names: list[str] = []

    def columns(self, module: nn.Module) -> Columns:
        """The same as ``module.named_parameters(remove_duplicate=False)``, in a tenth of the time.

        Modules with a walk of their own are asked for it.
        """
        tree: list[object] = []  # for every module its own names, and the places without a module
        tensors: list[torch.Tensor | None] = []
        stack: list[nn.Module | None] = [module]
        while stack:
            current = stack.pop()
            if current is None:
                tree.append(None)
                continue
            own, children = current._parameters, current._modules
            is_plain = isinstance(own, dict) and isinstance(children, dict)
            is_usual = is_plain and current.__dict__.keys().isdisjoint(_WALKS)
            if not (is_usual and _has_usual_walk(type(current))):  # type: ignore[arg-type]  # a class has a hash
                return columns(module.named_parameters(remove_duplicate=False))
            tree.append((*own, None, *children))
            tensors += own.values()
            stack += reversed(children.values())
        if tree != self._tree:
            self._tree, self._names = tree, list(_names_in(module, ""))
        present = [tensor for tensor in tensors if tensor is not None]
        if len(present) == len(tensors):
            return Columns(self._names, present)
        names = [name for name, tensor in zip(self._names, tensors, strict=True) if tensor is not None]
        return Columns(names, present)


def _names_in(module: nn.Module, prefix: str) -> Iterator[str]:
    """The names of all parameters, also of places without a parameter."""
    for name in module._parameters:
        yield prefix + name
    for name, child in module._modules.items():
        if child is not None:
            yield from _names_in(child, f"{prefix}{name}.")


@lru_cache(maxsize=256)
def _has_usual_walk(kind: type[nn.Module]) -> bool:
    return all(getattr(kind, walk) is getattr(nn.Module, walk) for walk in _WALKS)
