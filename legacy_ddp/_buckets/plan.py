"""The plan: the slot, the buffer and the parameter of every gradient. Made again only when the parameters change."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter

import torch

from legacy_ddp._buckets.backward_copy import BackwardCopy
from legacy_ddp._buckets.columns import Columns, ParameterWalk
from legacy_ddp._buckets.flat_buffer import FlatBuffer, SlotResult
from legacy_ddp._buckets.inventory import distinct
from legacy_ddp._buckets.layout import Bucket, Layout, plan_layout
from legacy_ddp._buckets.segment import SegmentPolicy
from legacy_ddp._buckets.signature import Signature
from legacy_ddp._settings import Settings
from legacy_ddp._step_guard.backward_counter import BackwardCounter


@dataclass(frozen=True)
class Plan:
    """The input of a call: the layout's slots, the parameter of each slot, and the buffers with the slots.

    A sequence with an item per slot is always flat, over all buckets. ``slot_ranges``: each buffer, with the range of
    its slots among all slots.
    """

    layout: Layout
    parameters: Sequence[torch.Tensor]
    buffers: Sequence[FlatBuffer]
    slot_ranges: Sequence[tuple[FlatBuffer, slice]]

    @property
    def grads(self) -> list[torch.Tensor | None]:
        """The current gradient of each slot's parameter."""
        return list(map(attrgetter("grad"), self.parameters))

    def bucket_of(self, index: int) -> Bucket:
        """The bucket of slot ``index``."""
        return next(buffer.bucket for buffer, slots in self.slot_ranges if slots.start <= index < slots.stop)

    def collect(self, grads: Sequence[torch.Tensor | None], *, are_used: bool = True) -> None:
        """Copy the dense gradients among ``grads``, one per slot, to their slots. No ``.grad`` sees the writes.

        With ``are_used=False`` gradients are neither checked nor copied.

        Raises:
            GradientError: as :func:`check_gradient`, before anything is copied.
        """
        for buffer, slots in self.slot_ranges:
            buffer.match_views(grads[slots])
            if are_used:
                buffer.check(grads[slots])
        for buffer, slots in self.slot_ranges:
            buffer.pack(grads[slots], copy=are_used)

    def kinds(self, grads: Sequence[torch.Tensor | None]) -> list[int]:
        """The kinds of the collected gradients."""
        kinds: list[int] = []
        for buffer, slots in self.slot_ranges:
            kinds += buffer.kinds(grads[slots])
        return kinds

    def alias(self, kinds: Sequence[int], sparse: Mapping[int, torch.Tensor]) -> None:
        """Give every parameter its reduced gradient; ``sparse`` has the sparse gradients, by slot."""
        for index, grad in sparse.items():
            self.parameters[index].grad = grad
        for buffer, slots in self.slot_ranges:
            buffer.alias(self.parameters[slots], kinds[slots])

    def discard_gradients(self) -> None:
        """Clear every ``.grad``, and drop the buffers' memory: a broken-off collective may still write there."""
        for parameter in self.parameters:
            parameter.grad = None
        for buffer in self.buffers:
            buffer.release_memory()


class Planner:
    """Keeps the plan of a set of parameters from call to call. Keeps no parameter alive."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.counter = BackwardCounter(guarded=settings.checks.guards_steps)
        self._backward_copy = BackwardCopy()
        self.layout: Layout | None = None  # of the last plan
        self.walk = ParameterWalk()
        self.segments = SegmentPolicy()
        self._buffers: list[FlatBuffer] = []
        self._slot_ranges: Sequence[tuple[FlatBuffer, slice]] = ()
        self._order: list[int] = []  # for each slot: the position of its parameter among the named parameters
        self._signature: Signature | None = None

    def change_settings(self, settings: Settings) -> None:
        """Use these settings from the next plan on; the next call makes a new plan."""
        self.settings, self._signature = settings, None

    @contextmanager
    def released_on_failure(self) -> Iterator[None]:
        """Remove all hooks from the parameters if the block fails.

        The wrapper under construction is then of no use, but stays alive as long as the user keeps the error.
        """
        try:
            yield
        except BaseException:
            self.counter.attach((), (), ())
            self._backward_copy.attach(())
            self._signature = None
            raise

    def plan(self, columns: Columns) -> Plan:
        """The plan for all names of every parameter: the last plan, if nothing changed since.

        Raises:
            ValueError: a parameter is not usable, as :func:`plan_layout` says.
        """
        names, tensors = columns
        known = self._signature is not None and self._signature.matches(names, tensors)
        parameters = list(map(tensors.__getitem__, self._order)) if known else []
        if self.layout is not None and known and self.counter.is_attached_to(parameters):
            return Plan(self.layout, parameters, self._buffers, self._slot_ranges)
        plan = self._replan(names, tensors)
        self.layout = plan.layout
        self._signature = Signature(names, tensors)
        return plan

    def _replan(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> Plan:
        layout = plan_layout(distinct(zip(names, tensors, strict=True), self.settings.ignore), self.settings)
        position = {name: index for index, name in enumerate(names)}
        order = [position[slot.name] for slot in layout.slots]
        buffers = [FlatBuffer(bucket, self.settings, self.segments) for bucket in layout.buckets]
        plan = Plan(layout, [tensors[index] for index in order], buffers, _slot_ranges(buffers))
        last_results = [SlotResult(buffer, index) for buffer in buffers for index in range(len(buffer.bucket.slots))]
        self.counter.attach([slot.name for slot in layout.slots], plan.parameters, last_results)
        self._backward_copy.attach((buffer, plan.parameters[slots]) for buffer, slots in plan.slot_ranges)
        self._order, self._buffers, self._slot_ranges = order, buffers, plan.slot_ranges
        return plan


def _slot_ranges(buffers: Sequence[FlatBuffer]) -> list[tuple[FlatBuffer, slice]]:
    bounds = accumulate((len(buffer.bucket.slots) for buffer in buffers), initial=0)
    return [(buffer, slice(*bound)) for buffer, bound in zip(buffers, pairwise(bounds), strict=True)]
