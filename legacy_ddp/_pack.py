"""What this rank brings to an all_reduce: its gradients, checked and packed, and the header that describes them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from legacy_ddp._bucket import FlatBuffer
from legacy_ddp._call import Call, check_moment
from legacy_ddp._errors import GradientError
from legacy_ddp._gradient import ABSENT, DENSE, SPARSE, kinds_of
from legacy_ddp._header import Flag, Header, Part, norm_word
from legacy_ddp._layout import fingerprint
from legacy_ddp._plan import Plan, Planner


@dataclass(frozen=True)
class Packed:
    """``kinds``: of every slot's gradient, all absent on a rank that takes no part. ``sparse``: coalesced, by slot."""

    kinds: Sequence[int]
    sparse: Mapping[int, torch.Tensor]
    header: Header


def pack(call: Call, planner: Planner, plan: Plan, sample_size: int | None, skip: bool) -> Packed:
    """Check what the user asks and holds, and copy the gradients into the flat buffers. Writes nothing a user can see.

    Raises:
        TypeError, ValueError: an unusable ``sample_size``.
        GradientError: a gradient that cannot be reduced, or that ``sample_size`` would divide a second time.
        LegacyDDPError: called from inside backward or while a CUDA graph is captured.
        ValueError: the group carries nothing for a device.
    """
    with call.phase("pack"):
        check_moment(call)
        header = _describe_part(sample_size, skip)
        grads = plan.grads
        for buffer, share in plan.shares:
            buffer.recognise(grads[share])
            if header.takes_part:
                buffer.check(grads[share])
        for buffer, share in plan.shares:
            _make_room(call, buffer)
            buffer.pack(grads[share], copy=header.takes_part)
        if not header.takes_part:
            kinds = [ABSENT] * len(grads)
            return Packed(kinds, {}, _complete(call, plan, header, kinds))
        header = header._replace(micro_batches=planner.counter.micro_batches, flags=_history(planner, plan, grads))
        if header.part == Part.SAMPLES and header.flags & Flag.REPEAT and not any(b.written for b in plan.buffers):
            raise GradientError(
                "the gradients are what the last all_reduce() left and no backward ran since: sample_size would divide "
                "them a second time; call all_reduce() once per step"
            )
        kinds = kinds_of(grads)
        sparse = {
            index: grad.coalesce() for index, grad in enumerate(grads) if grad is not None and kinds[index] >= SPARSE
        }
        if planner.settings.checks.level != "off":
            may_wait = planner.settings.checks.nonfinite_policy != "ignore"
            header = _add_values(header, plan, kinds, sparse, may_wait=may_wait)
        return Packed(kinds, sparse, _complete(call, plan, header, kinds))


def _make_room(call: Call, buffer: FlatBuffer) -> None:
    """Whatever a bucket needs to travel, found or made before the others wait."""
    if call.groups.size > 1:
        call.groups.payload(buffer.bucket.device)
        buffer.make_wire()


def _describe_part(sample_size: int | None, skip: bool) -> Header:
    if not isinstance(skip, bool):
        raise TypeError(f"skip is of the wrong type: got {skip!r}, expected True or False")
    if skip:
        return Header(part=Part.SKIP)
    if sample_size is not None and (isinstance(sample_size, bool) or not isinstance(sample_size, int)):
        hint = "; use .item() on a tensor" if hasattr(sample_size, "item") else ""
        raise TypeError(
            f"sample_size is of the wrong type: got {type(sample_size).__name__}, expected a host int or None{hint}"
        )
    if sample_size is not None and not 0 <= sample_size < 2**62:
        raise ValueError(f"sample_size is out of range: got {sample_size}, expected 0 to 2**62; 0 leaves this rank out")
    return Header(part=Part.PLAIN) if sample_size is None else Header(part=Part.SAMPLES, sample_size=sample_size)


def _history(planner: Planner, plan: Plan, grads: Sequence[torch.Tensor | None]) -> int:
    """Flags about what happened to gradients and weights since the last call."""
    flags = 0
    if planner.counter.stepped(plan.parameters):
        flags |= Flag.STEPPED
    if (
        planner.counter.micro_batches == 0
        and all(buffer.untouched(grads[share]) for buffer, share in plan.shares)
        # Cleared in place counts as cleared: a rank without a batch is no rank that calls twice.
        and any(_has_nonzero(grad) for grad in grads if grad is not None and grad.numel())
    ):
        flags |= Flag.REPEAT
    return flags


def _has_nonzero(grad: torch.Tensor) -> bool:
    # The norm is 20 times as fast as any(), but may underflow.
    return bool(torch.linalg.vector_norm(grad)) or bool(grad.any())


def _complete(call: Call, plan: Plan, header: Header, kinds: Sequence[int]) -> Header:
    return header._replace(
        layout=plan.layout.fingerprint, mask=fingerprint(bytes(kinds)), waited_us=int(call.seat.waited_seconds * 1e6)
    )


def _add_values(
    header: Header, plan: Plan, kinds: Sequence[int], sparse: Mapping[int, torch.Tensor], *, may_wait: bool
) -> Header:
    """Norm and finiteness of the local gradient; on other devices than CPU only if it may wait for the device."""
    if not may_wait and any(buffer.bucket.device.type != "cpu" for buffer in plan.buffers):
        return header
    pieces = [grad.values() for grad in sparse.values()]
    for buffer, share in plan.shares:
        runs = buffer.bucket.runs([kind == DENSE for kind in kinds[share]])
        pieces.extend(buffer.flat[start:stop] for start, stop in runs)
    norm, finite = norm_of(pieces)
    flags = header.flags | Flag.VALUES | (Flag.FINITE if finite else 0)
    return header._replace(flags=flags, norm_bits=norm_word(norm))


def norm_of(pieces: Sequence[torch.Tensor]) -> tuple[float, bool]:
    """2-norm of all pieces together, and whether every element is finite.

    Taken in the pieces' own precision (at least fp32); again in fp64 if that overflowed although all elements are
    finite.
    """
    norm = math.hypot(*_norms(pieces, wide=False))
    if math.isfinite(norm):
        return norm, True
    finite = all(bool(torch.isfinite(piece).all()) for piece in pieces)
    return (math.hypot(*_norms(pieces, wide=True)) if finite else norm), finite


def _norms(pieces: Sequence[torch.Tensor], *, wide: bool) -> list[float]:
    norms = [_norm(piece, wide=wide) for piece in pieces]
    read = [float(norm) for norm in norms if norm.device.type == "cpu"]
    away = [norm for norm in norms if norm.device.type != "cpu"]
    if away:  # one wait for the device, however many they are
        read += torch.stack([norm.to(away[0].device, torch.float64, non_blocking=True) for norm in away]).tolist()
    return read


def _norm(piece: torch.Tensor, *, wide: bool) -> torch.Tensor:
    if piece.is_complex():
        piece = torch.view_as_real(piece)
    narrow = torch.float32 if piece.dtype in (torch.float16, torch.bfloat16) else piece.dtype
    norm: torch.Tensor = torch.linalg.vector_norm(piece, dtype=torch.float64 if wide else narrow)
    return norm
