"""The present state of this rank, phase by phase, with tensors reduced to digests, norms and counts."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._buckets.layout import fingerprint
from legacy_ddp._record import SyncRecord
from legacy_ddp._replicas import state as hold
from legacy_ddp._replicas.digest import begin_digests
from legacy_ddp._torch import device as devices
from legacy_ddp.debug._trace.records import MAX_INPUTS, CallFacts, Names, Section, Values

Measured = tuple[str | None, float | None, int]

# Norms are taken of parts and joined in double precision: a sum of 2**24 squares in fp32 lost the fourth digit.
PART_NUMEL = 2**14
BATCH_NUMEL = 2**22
# Squares of fp32 numbers below 1e-19 lose digits, and vanish below 1e-23.
LEAST_FP32_NORM = 1e-15


def gradients(phase: str, held: Sequence[hold.StateItem]) -> list[Section]:
    """The gradients ``held``, as the section of ``phase``."""
    return _sections([(phase, held)])


def left_by_step(
    module: nn.Module,
    ignore: Collection[str],
    optimizers: Sequence[torch.optim.Optimizer],
    settings_of: Callable[[torch.optim.Optimizer], Iterable[hold.Fact]],
) -> list[Section]:
    """The settings used by a step, and the optimizer state and parameters after the step."""
    held = [
        ("settings", hold.optimizer_settings(optimizers, settings_of)),
        ("optimizer", hold.optimizer_states(optimizers, module)),
        ("parameters", hold.parameters(module, ignore)),
    ]
    return _sections([(phase, items) for phase, items in held if items])


def buffers(module: nn.Module, ignore: Collection[str]) -> list[Section]:
    """The section of all buffers; empty without buffers."""
    found = hold.buffers(module, ignore, local=())
    return _sections([("buffers", found)]) if found else []


class Inputs:
    """The arguments of the forward passes since the last call.

    ``found``: the first ``MAX_INPUTS`` values: dtype and shape of a tensor or type of a number or text, and 64 bits.
    ``complete``: no other arguments were passed.
    """

    def __init__(self) -> None:
        self.forwards = 0
        self.found: list[tuple[str, str]] = []
        self.complete = True

    def add(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Add one pass. A value without a digest makes the inputs incomplete."""
        self.forwards += 1
        try:
            room = MAX_INPUTS - len(self.found)
            values = list(islice(_leaves([args, kwargs]), room + 1))
            self.complete &= len(values) <= room and not any(isinstance(value, _Unknown) for value in values)
            known = [value for value in values[:room] if not isinstance(value, _Unknown)]
            measured = measure([value if isinstance(value, torch.Tensor) else _digest(value) for value in known])
            self.found += [(_kind(value), str(digest)) for value, (digest, _, _) in zip(known, measured, strict=True)]
        except Exception:  # noqa: BLE001 - wrapper tensors, as under vmap, are no reason to end a training
            self.complete = False


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


def _sections(held: Sequence[tuple[str, Sequence[hold.StateItem]]]) -> list[Section]:
    """The sections of all phases, measured together: few calls of torch, and one wait per device."""
    values = [item.value for _, items in held for item in items]
    measured = iter(measure([None if value is hold.NONE else value for value in values]))
    return [_section(phase, items, [next(measured) for _ in items]) for phase, items in held]


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
    )


def _finite(norm: float | None) -> float | None:
    """The norm, or None for infinity, which JSON lacks: finite gradients may have a norm too large for a float64."""
    return norm if norm is not None and math.isfinite(norm) else None


@torch.no_grad()
def measure(values: Sequence[torch.Tensor | str | None]) -> list[Measured]:
    """For each value: its digest or text, its 2-norm, and its number of NaN or infinite elements.

    A tensor has a digest of 16 hex digits. Its norm is the norm of the finite elements, rounded to 9 digits; None if
    a float64 is too small for the norm, or if the elements are no numbers (packed 4-bit elements, for example). A
    string stays as it is, without a norm; None stays None.

    The host waits once, once more if any norm is nearly zero, and for each sparse or non-finite tensor.

    Raises:
        TypeError: as :func:`legacy_ddp._replicas.digest.digest`.
    """
    tensors = [_coalesced(value) for value in values if isinstance(value, torch.Tensor)]
    with_numbers = [tensor for tensor in tensors if _has_numbers(tensor.dtype)]
    of_digests, finish_digests = begin_digests(tensors)
    of_norms, finish_norms = _begin_norms(with_numbers, torch.float32)
    read = devices.read_vectors([*of_digests, *of_norms])
    digests = iter(finish_digests(read[: len(of_digests)]))
    norms = iter(_finite_norms(with_numbers, finish_norms(read[len(of_digests) :])))
    return [
        (f"{next(digests) % 2**64:016x}", *(next(norms) if _has_numbers(value.dtype) else (None, 0)))
        if isinstance(value, torch.Tensor)
        else (value, None, 0)
        for value in values
    ]


def _coalesced(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor


def _finite_norms(tensors: Sequence[torch.Tensor], norms: list[float]) -> list[tuple[float | None, int]]:
    """For each tensor: the norm of the finite elements, and the number of non-finite elements. ``norms``: of fp32."""
    small = [index for index, norm in enumerate(norms) if norm < LEAST_FP32_NORM]
    of_small, finish = _begin_norms([devices.where_doubles_are(tensors[index]) for index in small], torch.float64)
    for index, norm in zip(small, finish(devices.read_vectors(of_small)), strict=True):
        norms[index] = norm
    return [
        (_rounded(norm), 0) if math.isfinite(norm) else _norm_by_parts(devices.where_doubles_are(tensor))
        for tensor, norm in zip(tensors, norms, strict=True)
    ]


def _begin_norms(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype
) -> tuple[list[torch.Tensor], Callable[[Sequence[Sequence[float]]], list[float]]]:
    """Vectors, and a function from the numbers in them to the 2-norm of each tensor.

    In the precision of the tensor or of ``dtype``, whichever is higher.
    """
    indices_of: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    found: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for indices, batch in _batches(tensors):
        first = batch[0]
        precision = torch.promote_types(first.dtype, dtype)
        indices_of.setdefault((first.device, precision), []).extend(indices)
        found.setdefault((first.device, precision), []).extend(internals.foreach_norm(batch, 2, dtype=precision))

    def finish(numbers: Sequence[Sequence[float]]) -> list[float]:
        norms_of_parts: list[list[float]] = [[] for _ in tensors]  # a large tensor has several parts
        for indices, norms in zip(indices_of.values(), numbers, strict=True):
            for index, norm in zip(indices, norms, strict=True):
                norms_of_parts[index].append(norm)
        return [math.hypot(*part_norms) for part_norms in norms_of_parts]

    return [torch.stack(norms) for norms in found.values()], finish


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Parts of equal device and dtype, with the indices of their tensors; limited in size, as parts may be copies."""
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
    """The elements as real floating point numbers of a dtype with norms in torch."""
    elements = tensor.values() if tensor.layout is torch.sparse_coo else tensor
    if elements.is_complex():
        elements = torch.view_as_real(elements.resolve_conj())
    if elements.numel() > PART_NUMEL:
        parts: Sequence[torch.Tensor] = elements.reshape(-1).chunk(-(-elements.numel() // PART_NUMEL))
    else:
        parts = [elements] if elements.numel() else []
    for part in parts:
        if not part.is_floating_point():
            yield devices.where_doubles_are(part).double()
        else:
            yield part if part.itemsize > 1 else part.float()


@cache
def _has_numbers(dtype: torch.dtype) -> bool:
    """Whether torch can convert elements of this dtype to numbers. Packed and opaque elements have no conversion."""
    try:
        torch.zeros(8, dtype=torch.uint8, device="cpu").view(dtype).to(torch.complex128)
    except (RuntimeError, TypeError):
        return False
    return True


def _norm_by_parts(tensor: torch.Tensor) -> tuple[float | None, int]:
    """Norm and number of non-finite elements, for a tensor with elements that are not finite or too large to square."""
    rows = []
    for part in _parts(tensor):
        finite = part.isfinite()
        numbers = part.double().where(finite, 0)
        largest = numbers.abs().amax()
        scaled = numbers / largest.where(largest > 0, 1)
        rows.append(torch.stack([largest, torch.linalg.vector_norm(scaled), (~finite).sum()]))
    parts = torch.stack(rows).tolist()
    norm = math.hypot(*(largest * scaled for largest, scaled, _ in parts))
    return _rounded(norm) if math.isfinite(norm) else None, int(sum(count for _, _, count in parts))


def _rounded(norm: float) -> float:
    """The norm with 9 digits: enough to distinguish any two fp32 numbers."""
    return float(f"{norm:.8e}")
