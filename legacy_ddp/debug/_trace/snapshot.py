"""Snapshots of the state of this rank, phase by phase: digests, norms and counts of tensors.

Functions with the arguments ``reader`` and ``take`` describe the present state. They call ``take`` with the sections
once the reader has read the numbers from the devices.

On the CPU a norm is computed in one pass, and computed again in doubles if a square was too large or too small, or if
an element is not finite. On a device the host would have to wait for that decision, and the tensor may have new values
by then. So on a device every tensor is first divided by its largest finite element.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._memory.layout import fingerprint
from legacy_ddp._record import SyncRecord
from legacy_ddp._replicas import state as hold
from legacy_ddp._torch import device as devices
from legacy_ddp._torch.device import Reader
from legacy_ddp.debug._operations.digest import begin_digests, digest_each
from legacy_ddp.debug._trace.records import MAX_INPUTS, CallFacts, Names, Section, Values

Measured = tuple[str | None, float | None, int]
_Norm = tuple[float | None, int]  # of the finite elements, and the number of the others

# Norms of parts are joined in double precision: in fp32 a sum of 2**24 squares had a wrong fourth digit.
PART_NUMEL = 2**14
BATCH_NUMEL = 2**22
# Squares of fp32 numbers below 1e-19 lose digits, and vanish below 1e-23.
LEAST_FP32_NORM = 1e-15


@torch.no_grad()
def begin_measure(
    values: Sequence[torch.Tensor | str | None], reader: devices.Reader, take: Callable[[list[Measured]], object]
) -> None:
    """Call ``take`` with the digest or text of each value, its 2-norm, and its number of NaN or infinite elements.

    The values are those at this call; ``take`` is called once ``reader`` has read the numbers.

    A tensor has a digest of 16 hex digits. Its norm is the norm of the finite elements, rounded to 9 digits; None if
    a float64 is too small for the norm, or if the elements are no numbers (packed 4-bit elements, for example). A
    string stays as it is, without a norm; None stays None.

    The host waits for each sparse tensor.
    """
    tensors = [_coalesced(value) for value in values if isinstance(value, torch.Tensor)]
    of_digests, finish_digests = begin_digests(tensors)
    of_norms, finish_norms = _begin_norms([tensor for tensor in tensors if _has_numbers(tensor.dtype)])

    def finish(numbers: list[list[Any]]) -> None:
        digests = iter(finish_digests(numbers[: len(of_digests)]))
        norms = iter(finish_norms(numbers[len(of_digests) :]))
        take(
            [
                (f"{next(digests) % 2**64:016x}", *(next(norms) if _has_numbers(value.dtype) else (None, 0)))
                if isinstance(value, torch.Tensor)
                else (value, None, 0)
                for value in values
            ]
        )

    reader.add([*of_digests, *of_norms], finish)


def _coalesced(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor


def _begin_norms(
    tensors: Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor], Callable[[Sequence[Sequence[float]]], list[_Norm]]]:
    """Vectors on the devices, and a function from their numbers to the norm of each tensor."""
    here = [index for index, tensor in enumerate(tensors) if tensor.device.type == "cpu"]
    away = [index for index, tensor in enumerate(tensors) if tensor.device.type != "cpu"]
    found = dict(zip(here, _norms_on_cpu([tensors[index] for index in here]), strict=True))
    vectors, finish_away = _begin_exact_norms([tensors[index] for index in away], torch.float32)

    def finish(numbers: Sequence[Sequence[float]]) -> list[_Norm]:
        norms = found | dict(zip(away, finish_away(numbers), strict=True))
        return [norms[index] for index in range(len(tensors))]

    return vectors, finish


def _norms_on_cpu(tensors: Sequence[torch.Tensor]) -> list[_Norm]:
    parts_of: list[list[float]] = [[] for _ in tensors]
    for indices, batch in _batches(tensors):
        norms = internals.foreach_norm(batch, 2, dtype=torch.promote_types(batch[0].dtype, torch.float32))
        for index, norm in zip(indices, torch.stack(norms).tolist(), strict=True):
            parts_of[index].append(norm)
    found = [math.hypot(*parts) for parts in parts_of]
    rare = [index for index, norm in enumerate(found) if not LEAST_FP32_NORM <= norm < math.inf]
    vectors, finish = _begin_exact_norms([tensors[index] for index in rare], torch.float64)
    exact = dict(zip(rare, finish(devices.read_vectors(vectors)), strict=True))
    return [exact.get(index, (_rounded(norm), 0)) for index, norm in enumerate(found)]


def _begin_exact_norms(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[list[torch.Tensor], Callable[[Sequence[Sequence[float]]], list[_Norm]]]:
    """Vectors, and a function from their numbers to the norm of each tensor, for elements of any size.

    Computed in the dtype of the tensor or in ``dtype``, whichever is more precise. A dozen operations for 4 million
    elements.
    """
    vectors: list[torch.Tensor] = []
    indices_of: list[list[int]] = []
    for indices, batch in _batches(tensors):
        precision, sizes = torch.promote_types(batch[0].dtype, dtype), [part.numel() for part in batch]
        elements = torch.cat([part.reshape(-1) for part in batch]).to(precision)
        is_finite = elements.isfinite()
        elements = elements.where(is_finite, 0)
        largest = torch.stack(internals.foreach_norm(torch.split(elements, sizes), math.inf))
        divisors = _repeat(largest.where(largest > 0, 1), sizes)
        scaled = internals.foreach_norm(torch.split(elements / divisors, sizes), 2)
        others = internals.foreach_norm(torch.split((~is_finite).to(precision), sizes), 1)  # exact: a part is small
        vectors.append(torch.cat([largest, torch.stack(scaled), torch.stack(others)]))
        indices_of.append(indices)

    def finish(numbers: Sequence[Sequence[float]]) -> list[_Norm]:
        norms_of: list[list[float]] = [[] for _ in tensors]  # a large tensor has several parts
        others_of = [0] * len(tensors)
        for indices, found in zip(indices_of, numbers, strict=True):
            count = len(indices)
            rows = zip(indices, found[:count], found[count : 2 * count], found[2 * count :], strict=True)
            for index, largest, scaled, others in rows:
                norms_of[index].append(largest * scaled)
                others_of[index] += int(others)
        norms = [math.hypot(*norms) for norms in norms_of]
        return [
            (_rounded(norm) if math.isfinite(norm) else None, count)
            for norm, count in zip(norms, others_of, strict=True)
        ]

    return vectors, finish


def _repeat(values: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    """Each value as often as its count. The host does not wait."""
    repeats = devices.host_tensor_for(counts, values.device).to(values.device, non_blocking=True)
    return values.repeat_interleave(repeats, output_size=sum(counts))


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Parts of equal device and dtype, with the indices of their tensors. Parts may be copies: size is limited."""
    waiting: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[torch.Tensor]]] = {}
    numels: dict[tuple[torch.device, torch.dtype], int] = {}
    for index, tensor in enumerate(tensors):
        for part in _parts(tensor):
            key = part.device, part.dtype
            if numels.get(key, 0) > BATCH_NUMEL:
                yield waiting.pop(key)
                numels[key] = 0
            numels[key] = numels.get(key, 0) + part.numel()
            indices, parts = waiting.setdefault(key, ([], []))
            indices.append(index)
            parts.append(part)
    yield from waiting.values()


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The elements as real floating-point numbers of a dtype for which torch has norms."""
    elements = tensor.values() if tensor.layout is torch.sparse_coo else tensor
    if elements.is_complex():
        elements = torch.view_as_real(elements.resolve_conj())
    if elements.numel() > PART_NUMEL:
        parts: Sequence[torch.Tensor] = elements.reshape(-1).chunk(-(-elements.numel() // PART_NUMEL))
    else:
        parts = [elements] if elements.numel() else []
    for part in parts:
        if not part.is_floating_point():
            yield part.double() if devices.has_float64(part.device.type) else part.float()
        else:
            yield part if part.itemsize > 1 else part.float()


@cache
def _has_numbers(dtype: torch.dtype) -> bool:
    """Whether torch can convert elements of this dtype to numbers; not if they are packed or opaque."""
    try:
        torch.zeros(8, dtype=torch.uint8, device="cpu").view(dtype).to(torch.complex128)
    except (RuntimeError, TypeError):
        return False
    return True


def _rounded(norm: float) -> float:
    return float(f"{norm:.8e}")  # 9 digits distinguish any two fp32 numbers


def digest_generators(module: nn.Module) -> str:
    """16 hex digits for torch's random generators."""
    return f"{fingerprint(repr(digest_each(hold.torch_generators(module))).encode()) % 2**64:016x}"


class Inputs:
    """The arguments of the forward passes since the last call.

    ``found``: the first ``MAX_INPUTS`` values, once ``reader`` has read them: dtype and shape of a tensor or type of a
    number or text, and 64 bits. ``complete``: no other arguments were passed.
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
        """Let the reader add the values to :attr:`found`. ``values``: tensors, or digests."""
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
    return f"{fingerprint(repr(value).encode()) % 2**64:016x}"  # not the value: a text may be confidential


def _kind(value: object) -> str:
    return hold.format_type(value) if isinstance(value, torch.Tensor) else type(value).__name__


def begin_sections(
    held: Sequence[tuple[str, Sequence[hold.StateItem]]], reader: Reader, take: Callable[[list[Section]], object]
) -> None:
    """Call ``take`` with a section for each phase, once ``reader`` has read the numbers from the devices.

    All phases are measured together, to save calls of torch.
    """

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
    """The norm, or None for infinity. JSON has no infinity, and the norm of finite gradients may overflow a float64."""
    return norm if norm is not None and math.isfinite(norm) else None
