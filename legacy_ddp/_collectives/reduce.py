"""The route of packed gradients: the reducers of a call, in order, and what they share. Collective (payload)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from legacy_ddp._agreement.agree import Agreement, agree_on_kinds
from legacy_ddp._buckets.flat_buffer import ABSENT, DENSE, FlatBuffer
from legacy_ddp._buckets.layout import Layout, Run
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._errors import AgreedError
from legacy_ddp._reproducible.micro_batches import Leaves
from legacy_ddp._transport.call import Call


@dataclass
class Payload:
    """The packed gradients of a call, what the ranks agreed on, and the result. Dense results go to the flat tensors.

    ``kinds``: of every slot's reduced gradient. ``has_same_mask``: every rank has gradients of these kinds. ``sparse``:
    the sparse results, by slot. ``size_bytes``: the bytes sent. ``prepared``: left by :meth:`Reducer.prepare` for
    :meth:`Reducer.reduce`.
    """

    plan: Plan
    packed: Packed
    kinds: Sequence[int]
    has_same_mask: bool
    divisor: int
    sparse: dict[int, torch.Tensor] = field(default_factory=dict)
    size_bytes: int = 0
    prepared: Any = None


class Reducer(ABC):
    """One way to reduce gradients. ``buckets``: numbers of the buckets of a layout whose dense gradients it reduces."""

    def __init__(self, buckets: Sequence[int]) -> None:
        self.buckets = buckets
        self._kinds: Sequence[int] | None = None
        self._runs: tuple[tuple[Run, ...], ...] = ()

    def prepare(self, call: Call, payload: Payload) -> None:  # noqa: B027 - most reducers prepare nothing
        """Collective: run functions of the user, before the payload phase. No flat tensor changes."""

    @abstractmethod
    def reduce(self, call: Call, payload: Payload) -> int:
        """Collective: replace the gradients by their sum over the ranks, divided by ``payload.divisor``.

        Afterwards they have the same bits on every rank.

        Returns:
            The number of bytes summed.
        """

    def buffers_of(self, payload: Payload) -> list[tuple[FlatBuffer, slice]]:
        """The buffers of :attr:`buckets`, each with the range of its slots among all slots."""
        ranges = payload.plan.slot_ranges
        return [ranges[index] for index in self.buckets]

    def dense_runs(self, payload: Payload) -> tuple[tuple[Run, ...], ...]:
        """The runs of slots with a dense gradient on any rank, and of small gaps between them, per bucket. Kept until
        the kinds change."""
        if payload.kinds != self._kinds:
            are_dense = [kind == DENSE for kind in payload.kinds]
            self._runs = tuple(
                tuple(buffer.bucket.runs(are_dense[share], max_gap=buffer.bucket.max_gap))
                for buffer, share in self.buffers_of(payload)
            )
            self._kinds = payload.kinds
        return self._runs


class Route:
    """The reducers of all gradients of a layout, in order. ``transport``: of dense gradients on CPU, for the record."""

    def __init__(self, layout: Layout, transport: str, parts: Sequence[Reducer]) -> None:
        self.layout = layout
        self.transport = transport
        self._parts = parts
        self._preparing = [part for part in parts if type(part).prepare is not Reducer.prepare]

    def reduce(self, call: Call, plan: Plan, packed: Packed, agreement: Agreement) -> Payload:
        """Collective: sum the packed gradients over the ranks and divide.

        Raises:
            CommHookError: the hook's result cannot be a gradient; no gradient changed.
            LostPeerError: a rank was lost. The content of the flat tensors is then undefined, as after an interrupt.
        """
        if agreement.divisor == 0:
            return Payload(plan, packed, [ABSENT] * len(packed.kinds), has_same_mask=True, divisor=0)
        kinds = packed.kinds if agreement.has_same_mask else agree_on_kinds(call, packed.kinds)
        payload = Payload(plan, packed, kinds, agreement.has_same_mask, agreement.divisor)
        for part in self._preparing:
            part.prepare(call, payload)
        with call.phase("payload"):
            for part in self._parts:
                payload.size_bytes += part.reduce(call, payload)
        return payload


@contextmanager
def discarding_after(call: Call, plan: Plan, leaves: Leaves | None) -> Iterator[None]:
    """Drop every gradient after a failure that is not agreed, if the gradients may be half reduced.

    Without shared memory they may be half reduced from the hook or the payload on. With shared memory, other ranks may
    write to the flat tensors of this rank from the header on, also after a failure here. The memory is dropped, too: a
    broken-off collective, or another rank or thread, may still write to it.
    """
    try:
        yield
    except AgreedError:
        raise
    except BaseException:
        if any(call.segments.serials) or call.phase_name in ("hook", "payload", "alias"):
            plan.discard_gradients()
            if leaves is not None:
                leaves.release_memory()
        raise
