"""Digest, 2-norm and number of non-finite elements of each value of a trace."""

import math
from collections.abc import Iterator, Sequence
from functools import cache

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._replicas.digest import digest_each

Measured = tuple[str | None, float | None, int]

# Norms are taken of parts and joined in double precision: a sum of 2**24 squares in fp32 lost the fourth digit.
PART_NUMEL = 2**14
BATCH_NUMEL = 2**22
# Squares of fp32 numbers below 1e-19 lose digits, and vanish below 1e-23.
LEAST_FP32_NORM = 1e-15


@torch.no_grad()
def measure(values: Sequence[torch.Tensor | str | None]) -> list[Measured]:
    """For each value: its digest or text, its 2-norm, and its number of NaN or infinite elements.

    A tensor has a digest of 16 hex digits. Its norm is the norm of the finite elements, rounded to 9 digits; None if
    a float64 is too small for the norm, or if the elements are no numbers (packed 4-bit elements, for example). A
    string stays as it is, without a norm; None stays None.

    The host waits twice per device, once more if any norm is nearly zero, and for each sparse or non-finite tensor.

    Raises:
        TypeError: as :func:`legacy_ddp._replicas.digest.digest`.
    """
    tensors = [_coalesced(value) for value in values if isinstance(value, torch.Tensor)]
    digests = iter(digest_each(tensors))
    norms = iter(_finite_norms([tensor for tensor in tensors if _has_numbers(tensor.dtype)]))
    return [
        (f"{next(digests) % 2**64:016x}", *(next(norms) if _has_numbers(value.dtype) else (None, 0)))
        if isinstance(value, torch.Tensor)
        else (value, None, 0)
        for value in values
    ]


def _coalesced(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor


def _finite_norms(tensors: Sequence[torch.Tensor]) -> list[tuple[float | None, int]]:
    """For each tensor: the norm of the finite elements, and the number of non-finite elements."""
    norms = _norms(tensors, torch.float32)
    small = [index for index, norm in enumerate(norms) if norm < LEAST_FP32_NORM]
    for index, norm in zip(small, _norms([tensors[index] for index in small], torch.float64), strict=True):
        norms[index] = norm
    return [
        (_rounded(norm), 0) if math.isfinite(norm) else _norm_by_parts(tensor)
        for tensor, norm in zip(tensors, norms, strict=True)
    ]


def _norms(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> list[float]:
    """2-norms, in the precision of the tensor or of ``dtype``, whichever is higher."""
    indices_of: dict[torch.device, list[int]] = {}
    found: dict[torch.device, list[torch.Tensor]] = {}
    for indices, batch in _batches(tensors):
        first = batch[0]
        norms = internals.foreach_norm(batch, 2, dtype=torch.promote_types(first.dtype, dtype))
        indices_of.setdefault(first.device, []).extend(indices)
        found.setdefault(first.device, []).append(torch.stack(norms).double())
    parts: list[list[float]] = [[] for _ in tensors]
    for device, batches in found.items():
        for index, norm in zip(indices_of[device], torch.cat(batches).tolist(), strict=True):
            parts[index].append(norm)
    return [math.hypot(*part) for part in parts]


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
            yield part.double()
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
