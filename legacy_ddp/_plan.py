"""Which parameter belongs to which slot: planned once, and again only when the parameters change."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch.nn.parameter import is_lazy

from legacy_ddp._bucket import FlatBuffer
from legacy_ddp._counting import BackwardCounter
from legacy_ddp._layout import Layout, distinct, gradient_dtype, plan_layout
from legacy_ddp._settings import Settings


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
    def shares(self) -> list[tuple[FlatBuffer, slice]]:
        """Each buffer, and which of the slots are its."""
        bounds = accumulate((len(buffer.bucket.slots) for buffer in self.buffers), initial=0)
        return [
            (buffer, slice(start, stop)) for buffer, (start, stop) in zip(self.buffers, pairwise(bounds), strict=True)
        ]

    def alias(self, kinds: Sequence[int], sparse: Mapping[int, torch.Tensor]) -> None:
        """Give every parameter its reduced gradient; ``sparse`` has the sparse ones, by slot."""
        for index, grad in sparse.items():
            self.parameters[index].grad = grad
        for buffer, share in self.shares:
            buffer.alias(self.parameters[share], kinds[share])

    def abandon(self) -> None:
        """Leave no gradient to step with, and no memory that a broken-off collective may still write to."""
        for parameter in self.parameters:
            parameter.grad = None
        for buffer in self.buffers:
            buffer.forget()


class Planner:
    """Recognises one set of parameters from call to call. Keeps none of them alive."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.counter = BackwardCounter(guarded=settings.checks.guards_steps)
        self._layout: Layout | None = None
        self._buffers: list[FlatBuffer] = []
        self._order: list[int] = []  # of each slot's parameter: its position among the named ones
        self._signature: list[tuple[object, ...]] = []

    def plan(self, named: Iterable[tuple[str, torch.Tensor]]) -> Plan:
        """The plan for ``named`` (all names of every parameter): the last one, if nothing changed since.

        Raises:
            ValueError: a parameter that no plan has room for.
        """
        found = list(named)
        first: dict[int, int] = {}  # which names belong to one tensor is part of it
        signature = [
            (first.setdefault(id(tensor), index), *_signature(name, tensor))
            for index, (name, tensor) in enumerate(found)
        ]
        parameters = [found[index][1] for index in self._order] if signature == self._signature else []
        if self._layout is None or signature != self._signature or not self.counter.watches(parameters):
            self._layout = self._replan(found)
            self._signature = signature
            parameters = [found[index][1] for index in self._order]
        return Plan(self._layout, parameters, self._buffers)

    def _replan(self, found: Sequence[tuple[str, torch.Tensor]]) -> Layout:
        layout = plan_layout(distinct(found, self.settings.ignore), self.settings)
        position = {name: index for index, (name, _) in enumerate(found)}
        self._order = [position[slot.name] for slot in layout.slots]
        self._buffers = [FlatBuffer(bucket, self.settings) for bucket in layout.buckets]
        self.counter.watch([slot.name for slot in layout.slots], [found[index][1] for index in self._order])
        return layout


def _signature(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    if is_lazy(tensor):  # has no shape to ask for
        return (name,)
    return (
        name,
        tensor.requires_grad,
        tensor.dtype,
        tensor.device,
        tensor.shape,
        tensor.stride(),
        gradient_dtype(tensor),
    )
