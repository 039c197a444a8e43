"""Gradients in memory of the script: which of them are held there, and which memory may take a result.

A script may keep its gradients in a tensor of its own, of which every ``.grad`` is a part, and read and clear them
there. A call then leaves its results there, too.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any, TypeGuard

import torch

from legacy_ddp import _torch as internals

# The memory of every flat tensor that exists: the storage, and the addresses of its begin and its end.
_flat_memory: list[tuple[Any, int, int]] = []


def note_flat_tensor(flat: torch.Tensor) -> None:
    start = flat.data_ptr()
    _flat_memory[:] = [
        *(memory for memory in _flat_memory if not memory[0].expired()),
        (internals.weak_storage(flat), start, start + flat.nbytes),
    ]


def is_in_flat_tensor(grad: torch.Tensor) -> bool:
    """Whether ``grad`` lies in a flat tensor of this process: of this wrapper, another wrapper, or an earlier plan."""
    address = grad.data_ptr()
    return any(start <= address < stop and not storage.expired() for storage, start, stop in _flat_memory)


def held_by_script(
    parameters: Sequence[torch.Tensor], indices: Sequence[int], given: Collection[int]
) -> frozenset[int]:
    """Those of ``indices`` whose gradient is a part of a larger tensor, or of memory from elsewhere, that is held.

    Backward, too, makes gradients as parts of one tensor, which nothing but ``.grad`` holds. ``given``: indices of
    gradients that the script has put into ``.grad``: there a reference to the part itself is enough.
    """
    parts = {index: grad for index in indices if _is_part(grad := parameters[index].grad)}
    distinct = {id(grad): grad for grad in parts.values()}
    on_storage = Counter(map(internals.storage_key, distinct.values()))
    held = {
        index
        for index, grad in parts.items()
        if not internals.is_memory_counted(grad)
        or internals.storage_use_count(grad) > on_storage[internals.storage_key(grad)]
    }
    others = [index for index in parts if index in given and index not in held]
    grad = None
    parts.clear()
    distinct.clear()  # these refer to gradients, too
    return frozenset(held.union(index for index in others if internals.is_grad_held(parameters[index])))


def _is_part(grad: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    return grad is not None and internals.is_part(grad) and not is_in_flat_tensor(grad)


class TakenMemory:
    """The memory of results and of parameters: a result is written to no memory of another result, or of weights."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._ids: set[int] = set()
        self._of_results = _Extents()
        self._of_parameters: _Extents | None = None  # looked at when a gradient shares its memory

    def take(self, grad: torch.Tensor) -> bool:
        """Take the memory of ``grad`` for a result, if no part of it is taken."""
        if id(grad) in self._ids:  # one tensor may be the gradient of two parameters
            return False
        self._ids.add(id(grad))
        if internals.has_memory_alone(grad):
            return True
        if self._of_parameters is None:
            self._of_parameters = _Extents()
            for extent in sorted(map(_extent, self._parameters)):
                self._of_parameters.add(*extent)
        start, stop = _extent(grad)
        if self._of_parameters.overlaps(start, stop) or self._of_results.overlaps(start, stop):
            return False
        self._of_results.add(start, stop)
        return True


def can_hold_result(grad: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether every element of ``grad``, of the shape and dtype of ``view``, can be written to on its own."""
    is_plain = grad.layout is torch.strided and not (grad.is_inference() or grad.is_conj() or grad.is_neg())
    is_alike = (grad.shape, grad.dtype) == (view.shape, view.dtype)
    return is_plain and is_alike and (grad.stride() == view.stride() or not _overlaps_itself(grad))


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements may share memory, as in an expanded tensor."""
    last = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= last:
                return True
            last += (size - 1) * stride
    return False


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of the first byte and behind the last byte."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.itemsize


class _Extents:
    """Ranges of addresses that do not overlap, in order."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []

    def overlaps(self, start: int, stop: int) -> bool:
        before = bisect_left(self._starts, stop)  # these begin before ``stop``, and the last of them ends last
        return before > 0 and self._stops[before - 1] > start

    def add(self, start: int, stop: int) -> None:
        """Add a range. Of ranges that overlap, as of shared weights, those that begin first are added first."""
        if self.overlaps(start, stop):
            self._stops[-1] = max(self._stops[-1], stop)
            return
        place = bisect_left(self._starts, start)
        self._starts.insert(place, start)
        self._stops.insert(place, stop)
