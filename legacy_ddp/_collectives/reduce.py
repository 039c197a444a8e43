"""The route of packed gradients: the reducers of a call, in order, and their common input. Collective (payload)."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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
    """The packed gradients of a call, and what the ranks agreed on. The flat tensors receive the dense results.

    ``kinds``: of every slot's reduced gradient. ``has_same_mask``: every rank has gradients of these kinds. ``sparse``:
    receives the sparse results, by slot. ``prepared``: left by :meth:`Reducer.prepare` for :meth:`Reducer.reduce`.
    """

    plan: Plan
    packed: Packed
    kinds: Sequence[int]
    has_same_mask: bool
    divisor: int
    sparse: dict[int, torch.Tensor] = field(default_factory=dict)
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
        """The runs of slots with a dense gradient on any rank, per bucket. Kept until the kinds change."""
        if payload.kinds != self._kinds:
            self._runs = tuple(_merged_runs(buffer, payload.kinds[share]) for buffer, share in self.buffers_of(payload))
            self._kinds = payload.kinds
        return self._runs


def _merged_runs(buffer: FlatBuffer, kinds: Sequence[int]) -> tuple[Run, ...]:
    """Runs with a small gap between them are merged."""
    return tuple(buffer.bucket.runs([kind == DENSE for kind in kinds], max_gap=buffer.bucket.max_gap))


@dataclass(frozen=True)
class Reduced:
    """Result of the payload phase: every slot's kind of gradient, sparse gradients by slot, and the bytes sent."""

    kinds: Sequence[int]
    sparse: Mapping[int, torch.Tensor]
    payload_bytes: int


@dataclass(frozen=True)
class Route:
    """The reducers of all gradients of a layout, in order. ``transport``: of dense gradients on CPU, for the record.

    ``preparing``: the reducers that prepare something.
    """

    layout: Layout
    transport: str
    parts: Sequence[Reducer]
    preparing: Sequence[Reducer] = field(init=False)

    def __post_init__(self) -> None:
        preparing = [part for part in self.parts if type(part).prepare is not Reducer.prepare]
        object.__setattr__(self, "preparing", preparing)

    def reduce(self, call: Call, plan: Plan, packed: Packed, agreement: Agreement) -> Reduced:
        """Collective: sum the packed gradients over the ranks and divide.

        Raises:
            CommHookError: the hook's result cannot be a gradient; no gradient changed.
            LostPeerError: a rank was lost. The content of the flat tensors is then undefined, as after an interrupt.
        """
        if agreement.divisor == 0:
            return Reduced([ABSENT] * len(packed.kinds), {}, 0)
        kinds = packed.kinds if agreement.has_same_mask else agree_on_kinds(call, packed.kinds)
        payload = Payload(plan, packed, kinds, agreement.has_same_mask, agreement.divisor)
        for part in self.preparing:
            part.prepare(call, payload)
        size_bytes = 0
        with call.phase("payload"):
            for part in self.parts:
                size_bytes += part.reduce(call, payload)
        return Reduced(kinds, payload.sparse, size_bytes)


@contextmanager
def discarding_after(call: Call, plan: Plan, leaves: Leaves | None) -> Iterator[None]:
    """Drop every gradient after a failure that is not agreed, if the gradients may be half reduced.

    Without segments from the hook or the payload on. With segments from the header on: other ranks may write to the
    flat tensors of this rank, also after its failure. The memory is dropped, too: a broken-off collective, or another
    rank or thread, may still write there.
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
