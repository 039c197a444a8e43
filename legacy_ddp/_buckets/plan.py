"""Which parameter belongs to which slot: planned once, and again only when the parameters change."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch

from legacy_ddp._buckets.backward_copy import BackwardCopy
from legacy_ddp._buckets.flat_buffer import FlatBuffer
from legacy_ddp._buckets.layout import Bucket, Layout, distinct, plan_layout
from legacy_ddp._buckets.signature import Signature
from legacy_ddp._settings import Settings
from legacy_ddp._step_guard.backward_counter import BackwardCounter


@dataclass(frozen=True)
class Plan:
    """What one call works on: the layout's slots, the parameter of each, and the buffers they lie in.

    Everything that is "one per slot" is a flat sequence over all buckets.
    """

    layout: Layout
    parameters: Sequence[torch.Tensor]
    buffers: Sequence[FlatBuffer]

    @property
    def grads(self) -> list[torch.Tensor | None]:
        """The gradient of each slot's parameter, as it is now."""
        return [parameter.grad for parameter in self.parameters]

    @cached_property
    def slot_ranges(self) -> list[tuple[FlatBuffer, slice]]:
        """Each buffer, and which of the slots are its."""
        return slot_ranges(self.buffers)

    def bucket_of(self, index: int) -> Bucket:
        """The bucket of slot ``index``."""
        return next(buffer.bucket for buffer, share in self.slot_ranges if share.start <= index < share.stop)

    def collect(self, grads: Sequence[torch.Tensor | None], *, are_used: bool = True) -> None:
        """Copy the dense ones among ``grads``, one per slot, to their slots; writes nothing that a ``.grad`` can see.
        Gradients that are not used are neither looked at nor copied.

        Raises:
            GradientError: as :func:`check_gradient`, before anything is copied.
        """
        for buffer, share in self.slot_ranges:
            buffer.match_views(grads[share])
            if are_used:
                buffer.check(grads[share])
        for buffer, share in self.slot_ranges:
            buffer.pack(grads[share], copy=are_used)

    def alias(self, kinds: Sequence[int], sparse: Mapping[int, torch.Tensor]) -> None:
        """Give every parameter its reduced gradient; ``sparse`` has the sparse ones, by slot."""
        for index, grad in sparse.items():
            self.parameters[index].grad = grad
        for buffer, share in self.slot_ranges:
            buffer.alias(self.parameters[share], kinds[share])

    def discard_gradients(self) -> None:
        """Leave no gradient to step with, and no memory that a broken-off collective may still write to."""
        for parameter in self.parameters:
            parameter.grad = None
        for buffer in self.buffers:
            buffer.release_memory()


class Planner:
    """Recognises one set of parameters from call to call. Keeps none of them alive."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.counter = BackwardCounter(guarded=settings.checks.guards_steps)
        self._backward_copy = BackwardCopy()
        self.layout: Layout | None = None  # the last one
        self._buffers: list[FlatBuffer] = []
        self._order: list[int] = []  # of each slot's parameter: its position among the named ones
        self._signature: Signature | None = None

    def change_settings(self, settings: Settings) -> None:
        """Plan anew, with these settings, when next asked."""
        self.settings, self._signature = settings, None

    @contextmanager
    def released_on_failure(self) -> Iterator[None]:
        """Leave no hook on any parameter if the block fails: the wrapper that it makes does not come about, however
        long somebody keeps the error, and the wrapper with it."""
        try:
            yield
        except BaseException:
            self.counter.attach((), (), ())
            self._backward_copy.attach(())
            self._signature = None
            raise

    def plan(self, named: Iterable[tuple[str, torch.Tensor]]) -> Plan:
        """The plan for ``named`` (all names of every parameter): the last one, if nothing changed since.

        Raises:
            ValueError: a parameter that no plan has room for.
        """
        names, tensors = _columns(named)
        known = self._signature is not None and self._signature.fits(names, tensors)
        parameters = [tensors[index] for index in self._order] if known else []
        if self.layout is None or not known or not self.counter.is_attached_to(parameters):
            self.layout = self._replan(names, tensors)
            self._signature = Signature(names, tensors)
            parameters = [tensors[index] for index in self._order]
        return Plan(self.layout, parameters, self._buffers)

    def _replan(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Layout:
        layout = plan_layout(distinct(zip(names, tensors, strict=True), self.settings.ignore), self.settings)
        position = {name: index for index, name in enumerate(names)}
        order = [position[slot.name] for slot in layout.slots]
        buffers = [FlatBuffer(bucket, self.settings) for bucket in layout.buckets]
        parameters = [tensors[index] for index in order]
        are_last_results = [
            partial(buffer.is_last_result, index) for buffer in buffers for index in range(len(buffer.bucket.slots))
        ]
        self.counter.attach([slot.name for slot in layout.slots], parameters, are_last_results)
        self._backward_copy.attach((buffer, parameters[share]) for buffer, share in slot_ranges(buffers))
        self._order, self._buffers = order, buffers
        return layout


def _columns(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[str], list[torch.Tensor]]:
    """Two lists, and no tuple per parameter that stays: thousands of them set Python's garbage collector going."""
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    for name, tensor in named:
        names.append(name)
        tensors.append(tensor)
    return names, tensors


def slot_ranges(buffers: Sequence[FlatBuffer]) -> list[tuple[FlatBuffer, slice]]:
    """Each buffer, and which of the slots of all buffers are its."""
    bounds = accumulate((len(buffer.bucket.slots) for buffer in buffers), initial=0)
    return [(buffer, slice(start, stop)) for buffer, (start, stop) in zip(buffers, pairwise(bounds), strict=True)]
