"""Are these parameters the ones that were planned for? Asked in every call, so it takes few steps per parameter."""

from collections.abc import Sequence

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from legacy_ddp import _torch as internals


class Signature:
    """All that a plan depends on. Keeps no parameter alive.

    Which tensors have several names shows in their identities. That a new tensor may have the identity of one that is
    gone does not matter: it lacks the hooks of the old one.
    """

    def __init__(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        self._identities = _identities(names, tensors)
        first = {id(tensor): index for index, tensor in reversed(list(enumerate(tensors)))}
        self._first = sorted(first.values())  # where each tensor stands under the first of its names
        shaped = self._shaped(tensors)
        self._facts = _facts(shaped)
        self._guards = internals.TensorGuards(shaped)

    def fits(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> bool:
        """Whether a plan for these would be the same."""
        if _identities(names, tensors) != self._identities:
            return False
        shaped = self._shaped(tensors)
        if self._guards.match(shaped) and internals.grad_dtypes(shaped) == self._facts[0]:
            return True
        if _facts(shaped) != self._facts:
            return False
        self._guards = internals.TensorGuards(shaped)  # called under other settings than the last time
        return True

    def _shaped(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Each tensor once, but for those that have no shape yet: lazy ones."""
        distinct = tensors if len(self._first) == len(tensors) else [tensors[index] for index in self._first]
        if any(issubclass(kind, (UninitializedParameter, UninitializedBuffer)) for kind in set(self._identities[2])):
            return [tensor for tensor in distinct if not is_lazy(tensor)]
        return distinct


def _identities(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> tuple[list[str], list[int], list[type]]:
    return list(names), list(map(id, tensors)), list(map(type, tensors))


def _facts(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.dtype | None], Sequence[tuple[object, ...]]]:
    facts = [(each.requires_grad, each.dtype, each.device, each.shape, each.stride()) for each in tensors]
    return internals.grad_dtypes(tensors), facts
