"""The comparison of parameters with the planned parameters. Runs in every call, in few steps per parameter."""

from collections.abc import Sequence

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from legacy_ddp import _torch as internals


class Signature:
    """All properties of parameters on which a plan depends. Keeps no parameter alive.

    Identities show which tensors have several names. A new tensor may get the identity of a deleted tensor; the counter
    notices, because the new tensor lacks the hooks of the old tensor.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self._identities = _identities(names, tensors)
        first = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
        self._first = sorted(first.values())  # index of the first name of each tensor
        kinds = set(self._identities[2])
        self._has_lazy = any(issubclass(kind, (UninitializedParameter, UninitializedBuffer)) for kind in kinds)
        shaped = self._shaped(tensors)
        self._facts = _facts(shaped)
        self._guards = internals.TensorGuards(shaped)

    def matches(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a plan for these parameters would be the same plan."""
        if (names, list(map(id, tensors)), list(map(type, tensors))) != self._identities:
            return False
        shaped = self._shaped(tensors) if self._has_lazy or len(self._first) < len(tensors) else tensors
        if self._guards.match(shaped) and internals.grad_dtypes(shaped) == self._facts[0]:
            return True
        if _facts(shaped) != self._facts:
            return False
        self._guards = internals.TensorGuards(shaped)  # autocast or inference settings differ from the last call
        return True

    def _shaped(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Each tensor once, without lazy tensors, which have no shape yet."""
        distinct = tensors if len(self._first) == len(tensors) else [tensors[index] for index in self._first]
        if self._has_lazy:
            return [tensor for tensor in distinct if not is_lazy(tensor)]
        return distinct


def _identities(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> tuple[Sequence[str], list[int], list[type]]:
    return names, list(map(id, tensors)), list(map(type, tensors))


def _facts(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.dtype | None], Sequence[tuple[object, ...]]]:
    facts = [(each.requires_grad, each.dtype, each.device, each.shape, each.stride()) for each in tensors]
    return internals.grad_dtypes(tensors), facts
