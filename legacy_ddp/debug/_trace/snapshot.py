"""The present state of this rank, phase by phase, with tensors reduced to digests, norms and counts.

Each function takes a ``reader`` and a function ``take``: the sections are of the present state, and ``take`` is called
with them once the reader has read the numbers that were on a device.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn

from legacy_ddp._buckets.layout import fingerprint
from legacy_ddp._record import SyncRecord
from legacy_ddp._replicas import state as hold
from legacy_ddp._torch.device import Reader
from legacy_ddp.debug._operations.digest import begin_digests, digest_each
from legacy_ddp.debug._trace.measure import Measured, begin_measure
from legacy_ddp.debug._trace.records import MAX_INPUTS, CallFacts, Names, Section, Values

Take = Callable[[list[Section]], object]


def gradients(phase: str, held: Sequence[hold.StateItem], reader: Reader, take: Take) -> None:
    """The gradients ``held``, as the section of ``phase``."""
    _begin_sections([(phase, held)], reader, take)


def left_by_step(
    module: nn.Module,
    ignore: Collection[str],
    optimizers: Sequence[torch.optim.Optimizer],
    settings_of: Callable[[torch.optim.Optimizer], Iterable[hold.Fact]],
    reader: Reader,
    take: Take,
) -> None:
    """The settings used by a step, and the optimizer state and parameters after the step."""
    held = [
        ("settings", hold.optimizer_settings(optimizers, settings_of)),
        ("optimizer", hold.optimizer_states(optimizers, module)),
        ("parameters", hold.parameters(module, ignore)),
    ]
    _begin_sections([(phase, items) for phase, items in held if items], reader, take)


def buffers(module: nn.Module, ignore: Collection[str], reader: Reader, take: Take) -> None:
    """The section of all buffers; none without buffers."""
    found = hold.buffers(module, ignore, local=())
    _begin_sections([("buffers", found)] if found else [], reader, take)


def digest_generators(module: nn.Module) -> str:
    """16 hex digits for torch's random generators."""
    return f"{fingerprint(repr(digest_each(hold.torch_generators(module))).encode()) % 2**64:016x}"


class Inputs:
    """The arguments of the forward passes since the last call.

    ``found``: the first ``MAX_INPUTS`` values: dtype and shape of a tensor or type of a number or text, and 64 bits;
    there once ``reader`` has read them. ``complete``: no other arguments were passed.
    """

    def __init__(self, reader: Reader) -> None:
        self.forwards = 0
        self.found: list[tuple[str, str]] = []
        self.complete = True
        self._reader = reader
        self._room = MAX_INPUTS

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Add one pass. A value without a digest makes the inputs incomplete."""
        self.forwards += 1
        try:
            values = list(islice(_leaves([args, kwargs]), self._room + 1))
            self.complete &= len(values) <= self._room and not any(isinstance(value, _Unknown) for value in values)
            known = [value for value in values[: self._room] if not isinstance(value, _Unknown)]
            digests = [value if isinstance(value, torch.Tensor) else _digest(value) for value in known]
            self._begin(list(map(_kind, known)), digests)
            self._room -= len(known)
        except Exception:  # noqa: BLE001 - wrapper tensors, as under vmap, are no reason to end a training
            self.complete = False

    def _begin(self, kinds: Sequence[str], values: Sequence[torch.Tensor | str]) -> None:
        """Let the reader add the values. ``values``: tensors, or digests."""
        vectors, finish = begin_digests([value for value in values if isinstance(value, torch.Tensor)])

        def take(numbers: list[list[Any]]) -> None:
            read = iter(finish(numbers))
            digests = [f"{next(read) % 2**64:016x}" if isinstance(value, torch.Tensor) else value for value in values]
            self.found += zip(kinds, digests, strict=True)

        self._reader.add(vectors, take)


class _Unknown:
    """Placeholder for a value of an unsupported type."""


def _leaves(value: object) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key in value:
            yield from _leaves(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, torch.Tensor):
        yield value if isinstance(hold.comparable(value), torch.Tensor) else _Unknown()
    elif value is None or isinstance(value, bool | int | float | str):
        yield value
    else:
        yield _Unknown()


def _digest(value: object) -> str:
    """64 bits instead of the value, as a text may be confidential."""
    return f"{fingerprint(repr(value).encode()) % 2**64:016x}"


def _kind(value: object) -> str:
    return hold.format_type(value) if isinstance(value, torch.Tensor) else type(value).__name__


def _begin_sections(held: Sequence[tuple[str, Sequence[hold.StateItem]]], reader: Reader, take: Take) -> None:
    """The sections of all phases, measured together: few calls of torch."""

    def finish(measured: Sequence[Measured]) -> None:
        rest = iter(measured)
        take([_section(phase, items, [next(rest) for _ in items]) for phase, items in held])

    values = [item.value for _, items in held for item in items]
    begin_measure([None if value is hold.NONE else value for value in values], reader, finish)


def _section(phase: str, items: Sequence[hold.StateItem], measured: Sequence[Measured]) -> Section:
    kinds = ["" if isinstance(item.value, str) else hold.format_type(item.value) for item in items]
    digests, norms, counts = zip(*measured, strict=True) if measured else ((), (), ())
    return Section(
        Names(phase, _distinct([item.name for item in items]), tuple(kinds)),
        Values(digests, norms, {index: count for index, count in enumerate(counts) if count}),
    )


def _distinct(names: Sequence[str]) -> tuple[str, ...]:
    """The names, with a number after each repetition (of keys ``1`` and ``"1"`` of an optimizer state, for example)."""
    counts: Counter[str] = Counter()
    distinct = []
    for name in names:
        counts[name] += 1
        distinct.append(f"{name} ({counts[name]})" if counts[name] > 1 else name)
    return tuple(distinct)


def facts_of(record: SyncRecord, generators: str, inputs: Inputs) -> CallFacts:
    """The facts about a call on this rank. ``generators``: 16 hex digits. ``inputs``: since the last call."""
    row = record.rows[record.rank]
    return CallFacts(
        call=record.call,
        micro_batches=row.micro_batches,
        sample_size=row.sample_size,
        took_part=row.took_part,
        divisor=record.divisor,
        local_norm=_finite(row.local_norm) if row.finite else None,
        finite=row.finite,
        payload_bytes=record.payload_bytes,
        seconds={phase: round(seconds, 6) for phase, seconds in record.seconds.items()},
        seconds_waited=round(record.seconds["agree"], 6),
        generators=generators,
        forwards=inputs.forwards,
        inputs=tuple(inputs.found),
        inputs_complete=inputs.complete and inputs.forwards >= row.micro_batches,
        metrics=record.metrics,
        parts={"data": row.data_seconds, "forward": row.forward_seconds, "backward": row.backward_seconds},
    )


def _finite(norm: float | None) -> float | None:
    """The norm, or None for infinity, which JSON lacks: finite gradients may have a norm too large for a float64."""
    return norm if norm is not None and math.isfinite(norm) else None
