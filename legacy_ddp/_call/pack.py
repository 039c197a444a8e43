"""What this rank brings to an all_reduce: checked arguments and gradients in flat tensors, and the header.

``Plan.collect`` (or ``Leaves`` with micro-batches) copies the gradients. Here are the checks around the copy, the facts
about the gradients, and their norm.

Metrics are numbers of the training loop, read on each rank and summed over the ranks.
"""

import json
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, SupportsFloat, SupportsIndex, TypeGuard

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._errors import GradientError
from legacy_ddp._memory.flat_buffer import ABSENT, DENSE, SPARSE
from legacy_ddp._memory.layout import fingerprint
from legacy_ddp._memory.plan import Plan
from legacy_ddp._memory.segment import Segment
from legacy_ddp._ranks.agree import Agreement
from legacy_ddp._ranks.call import Call, check_can_communicate
from legacy_ddp._ranks.header import Flag, Header, Participation, encode_double
from legacy_ddp._reproducible import Leaves
from legacy_ddp._steps.backward_counter import BackwardCounter
from legacy_ddp._steps.policy import check_complete
from legacy_ddp._text import error_line
from legacy_ddp._torch import device as devices
from legacy_ddp._torch.device import have_nonzero


def read_metrics(metrics: object, reader: devices.Reader | None = None) -> dict[str, float]:
    """The value of every metric, sorted by name. ``reader``: as for :func:`read_numbers`."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics is of the wrong type: got {type(metrics).__name__}, expected a mapping of names to numbers, such "
            "as {'loss': 1.5}"
        )
    for name in metrics:
        if not isinstance(name, str):
            raise TypeError(f"a name in metrics is of the wrong type: got {name!r}, expected a str")
        if not name:
            raise ValueError("a name in metrics is empty: got '', expected at least one character, such as 'loss'")
    return read_numbers("metrics", {name: metrics[name] for name in sorted(metrics)}, reader=reader)


def read_numbers(
    owner: str,
    values: Mapping[str, object],
    expected: str = "a real number or a tensor with one element",
    *,
    reader: devices.Reader | None = None,
) -> dict[str, float]:
    """Every value as a double. Tensors on other devices than the CPU are read together, with one wait.

    ``expected``: the values that ``owner`` takes, for the text of an error. ``reader``: reads these tensors later,
    together with others. Until then their values are NaN.

    Raises:
        TypeError: a value is not a number, or has several elements; the text has ``owner`` and the name.
        ValueError: an int beyond the range of a double.
    """
    away = {
        name: value for name, value in values.items() if isinstance(value, torch.Tensor) and value.device.type != "cpu"
    }
    for name, value in away.items():
        _require_one_real_element(f"{owner}[{name!r}]", value)
    found = {name: _number(f"{owner}[{name!r}]", value, expected) for name, value in values.items() if name not in away}
    numbers = {name: found.get(name, math.nan) for name in values}
    if away:
        later = reader or devices.Reader()
        for name, value in away.items():
            later.add_scalar(value, partial(_take, numbers, name))
        if reader is None:
            later.read()
    return numbers


def _take(numbers: dict[str, float], name: str, number: float) -> None:
    numbers[name] = float(number)


def sum_metrics(call: Call, agreement: Agreement, metrics: Mapping[str, float]) -> dict[str, float]:
    """The sum of every metric over the ranks, equal on every rank. ``metrics``: of this rank.

    Collective if a rank has metrics: 8 bytes a metric from every rank. A rank that has left a join() counts as zeros,
    and learns the names here.
    """
    if not metrics and not any(agreement.column("metric_names")):
        return {}
    with call.phase("metrics"):
        names: Sequence[str] = tuple(metrics)
        if agreement.some_flags & Flag.JOINED:
            names = next(filter(None, call.gather_objects(names)))
        own = torch.tensor([metrics.get(name, 0.0) for name in names], dtype=torch.float64, device="cpu")
        columns = call.gather(own).T.tolist()
    return dict(zip(names, map(_sum, columns), strict=True))


def _sum(values: Sequence[float]) -> float:
    """The exact sum, rounded once."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # beyond the range of a double, or infinities of both signs
        return sum(values)


def _require_one_real_element(label: str, value: torch.Tensor) -> None:
    if value.numel() != 1:
        raise TypeError(
            f"{label} is not usable: got a tensor of shape {tuple(value.shape)}, expected one element; sum it first"
        )
    if value.is_meta:
        raise TypeError(f"{label} is not usable: got a tensor of the meta device, expected a tensor with a value")
    if value.is_complex():
        raise TypeError(f"{label} is not usable: got a tensor of {value.dtype}, expected a real number")


def _number(label: str, value: Any, expected: str) -> float:
    if isinstance(value, torch.Tensor):
        _require_one_real_element(label, value)
    try:
        held = value.item() if hasattr(value, "item") else value
        if not hasattr(type(held), "__float__"):  # float() would read the digits of a text
            raise TypeError(f"no real number: {type(held).__name__}")
        return float(held)
    except OverflowError as error:
        raise ValueError(f"{label} is out of range: got more than 1.8e308, expected a double") from error
    except Exception as error:  # noqa: BLE001 - a conversion may be the user's code
        raise TypeError(
            f"{label} is not usable: got {type(value).__name__}, expected {expected} ({error_line(error)})"
        ) from None


_RANGE = "sample_size is out of range: got {}, expected 0 to 2**62 - 1; 0 leaves this rank out"
Metrics = Mapping[str, SupportsFloat] | None
_FLAT, _KINDS = attrgetter("flat"), attrgetter("kinds")
_mask_of = lru_cache(maxsize=8)(fingerprint)  # the kinds of gradients are the same in most calls


class Arguments(NamedTuple):
    """The arguments of :meth:`LegacyDistributedDataParallel.all_reduce`, not checked yet."""

    sample_size: SupportsIndex | float | None = None
    skip: bool = False
    metrics: Metrics = None


@dataclass(frozen=True)
class Packed:
    """The packed gradients of a rank, and their header."""

    kinds: Sequence[int]  # of the gradient of every slot; all absent on a rank that takes no part
    flats: Sequence[torch.Tensor]  # a tensor per buffer, with the dense gradients
    sparse: Mapping[int, torch.Tensor]  # the sparse gradients, coalesced, by slot
    header: Header
    # With micro-batches the shared memory of each of ``flats``; None for the flat tensor of the buffer.
    segments: Sequence[Segment | None] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)  # of this rank, by name
    stale: Sequence[int] = ()  # positions of the gradients that hold an earlier result, by BackwardCounter.stale()
    was_edited: bool = False  # as BackwardCounter.was_first_edited()

    def grads(self, plan: Plan) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Every slot's name and gradient, in slot order."""
        for (buffer, share), flat in zip(plan.slot_ranges, self.flats, strict=True):
            for index, slot in enumerate(buffer.bucket.slots, share.start):
                kind = self.kinds[index]
                dense = flat.as_strided(slot.shape, slot.stride, slot.offset) if kind == DENSE else None
                yield slot.name, dense if kind <= DENSE else self.sparse[index]


def pack(call: Call, counter: BackwardCounter, leaves: Leaves | None, plan: Plan, arguments: Arguments) -> Packed:
    """Check arguments and gradients, and copy the gradients into flat tensors. Writes nothing that a user can see."""
    with call.phase("pack"):
        check_can_communicate(call)
        reader = None if plan.layout.is_on_cpu else devices.Reader()
        metrics = {} if arguments.metrics is None else read_metrics(arguments.metrics, reader)
        header = _header_of(arguments.sample_size, arguments.skip, reader)
        header.metric_names = fingerprint(json.dumps([*metrics]).encode()) if metrics else 0
        has_peers, checks = call.groups.size > 1, call.checks
        # On a device only if the host may wait for the norm.
        wants_norm = checks.nonfinite_policy in ("raise", "skip") or (reader is None and checks.level != "off")
        stale: Sequence[int] = ()
        if (is_weighted := header.participation == Participation.SAMPLES) or counter.divided:
            # Before _collect(), which forgets the results of the last call if a gradient is kept elsewhere.
            stale = counter.stale(plan.parameters, is_weighted=is_weighted)
        takes_part = header.takes_part  # until the sample_size is read, which may be 0
        grads = _collect(plan, leaves, header, reader, takes_part=takes_part)
        if reader is not None or plan.may_need_wire:
            _allocate(call, plan, has_wire=leaves is None)
        flats: Sequence[torch.Tensor] = list(map(_FLAT, plan.buffers))
        kinds = list(chain.from_iterable(map(_KINDS, plan.buffers)))
        norms: Sequence[float] = ()
        if reader is not None:
            if leaves is None:
                norms = _read_together(plan, kinds, header, reader, wants_norm=wants_norm)
            takes_part = header.takes_part
        sparse: dict[int, torch.Tensor] = {}
        if takes_part:
            _note_step(call, counter, plan, grads, header)
            if leaves is not None:
                header.leaves, kinds, flats = leaves.sums.total(plan, kinds, has_peers=has_peers)
            if max(kinds, default=ABSENT) >= SPARSE:
                sparse = {i: grad.coalesce() for i, grad in enumerate(grads) if grad is not None and kinds[i] >= SPARSE}
        else:
            kinds = [ABSENT] * len(plan.parameters)
            if leaves is not None:
                flats = leaves.zeros(plan, has_peers=has_peers)
        header.layout, header.mask = plan.layout.fingerprint, _mask_of(bytes(kinds))
        header.waited_seconds = call.group_state.waited_seconds
        segments = () if leaves is None else leaves.sums.segments(flats)
        was_edited = counter.was_first_edited(plan.parameters)
        packed = Packed(kinds, flats, sparse, header, segments, metrics, stale, was_edited)
        if takes_part and wants_norm:
            norm, is_finite = norm_of(pieces_of(plan, packed), norms)
            header.flags |= Flag.VALUES if is_finite else Flag.VALUES | Flag.NONFINITE
            header.norm_bits = encode_double(norm)
        return packed


def _collect(
    plan: Plan, leaves: Leaves | None, header: Header, reader: devices.Reader | None, *, takes_part: bool
) -> Sequence[torch.Tensor | None]:
    """Copy the gradients of a rank that takes part."""
    if leaves is not None:
        _require_sample_size(header)
        if reader is not None:
            reader.read()
        return leaves.collect_last(plan) if header.takes_part else []
    grads = plan.grads
    try:
        plan.collect(grads, are_used=takes_part)
    except GradientError:
        if reader is None:
            raise
        reader.read()
        if header.takes_part:
            raise
        plan.collect(grads, are_used=False)
    return grads


def _read_together(
    plan: Plan, kinds: Sequence[int], header: Header, reader: devices.Reader, *, wants_norm: bool
) -> list[float]:
    """Read metrics, sample_size and the norms of dense gradients from the devices, with one wait of the host.

    Returns the norm of each piece of the gradients (:func:`pieces_of`); nothing if some gradients are sparse.
    """
    norms: list[float] = []
    if header.takes_part and wants_norm and max(kinds, default=ABSENT) < SPARSE:
        flats = [buffer.views.flat for buffer in plan.buffers]
        for piece in pieces_of(plan, Packed(kinds, flats, {}, header)):
            reader.add_scalar(_norm(piece), norms.append)
    reader.read()
    return norms


def _allocate(call: Call, plan: Plan, *, has_wire: bool) -> None:
    """Find the group of every buffer's device, and allocate the copies for the wire."""
    has_peers = call.groups.size > 1
    for buffer in plan.buffers:
        if has_peers and buffer.bucket.device.type != "cpu":
            call.groups.payload(buffer.bucket.device)
        if has_wire and buffer.may_need_wire:
            buffer.make_wire(has_peers=has_peers)


def allocate_for_gloo(call: Call, leaves: Leaves | None, plan: Plan, packed: Packed) -> None:
    """Allocate the memory for gloo, which packing left out because shared memory was the transport."""
    _allocate(call, plan, has_wire=leaves is None)
    if leaves is not None:
        leaves.sums.reserve(packed.flats)


def _header_of(sample_size: SupportsIndex | float | None, skip: bool, reader: devices.Reader | None) -> Header:
    if not isinstance(skip, bool):
        raise TypeError(f"skip is of the wrong type: got {skip!r}, expected True or False")
    if skip:
        return Header(participation=Participation.SKIP)
    if sample_size is None:
        return Header(participation=Participation.PLAIN)
    if reader is not None and _is_number_on_device(sample_size):
        header = Header(participation=Participation.SAMPLES, sample_size=1)  # until it is read: the rank takes part
        reader.add_scalar(sample_size, partial(_set_sample_size, header, sample_size.dtype))
        return header
    return Header(participation=Participation.SAMPLES, sample_size=_number_of_items(sample_size))


def _is_number_on_device(size: object) -> TypeGuard[torch.Tensor]:
    return (
        isinstance(size, torch.Tensor)
        and size.device.type not in ("cpu", "meta")
        and size.numel() == 1
        and size.dtype != torch.bool
        and not size.is_complex()
    )


def _set_sample_size(header: Header, dtype: torch.dtype, number: float) -> None:
    header.sample_size = _number_of_items(_whole(number, dtype) if dtype.is_floating_point else int(number))


def _number_of_items(sample_size: Any) -> int:
    try:
        if isinstance(sample_size, bool) or getattr(sample_size, "dtype", None) == torch.bool:
            raise TypeError("True and False count nothing")
        dtype = _floating_dtype(sample_size)
        number = operator.index(sample_size) if dtype is None else _whole(sample_size, dtype)
    except TypeError:
        raise TypeError(
            f"sample_size is of the wrong type: got {_name_type(sample_size)}, expected a whole number (of Python or "
            "NumPy, or a tensor of one element), or None; pass int(n) if n counts items"
        ) from None
    if not 0 <= number < 2**62:
        raise ValueError(_RANGE.format(number))
    return number


def _floating_dtype(size: object) -> torch.dtype | None:
    """The dtype of a floating number of Python or NumPy, or of a tensor of one element; None for all others."""
    dtype = getattr(size, "dtype", torch.float64 if isinstance(size, float) else None)
    found = getattr(torch, str(dtype).removeprefix("torch."), None)  # NumPy has the same names
    is_single = size.numel() == 1 if isinstance(size, torch.Tensor) else not getattr(size, "shape", ())
    return found if isinstance(found, torch.dtype) and found.is_floating_point and is_single else None


def _whole(size: Any, dtype: torch.dtype) -> int:
    """A floating number as an int. ValueError: it has a fraction, or is so large that it may have been rounded."""
    number = float(size.item() if isinstance(size, torch.Tensor) else size)
    if not math.isfinite(number):
        raise ValueError(_RANGE.format(number))
    if not number.is_integer():
        raise ValueError(
            f"sample_size is not a whole number: got {number}, expected a number of items; to divide by a sum of "
            "weights, leave sample_size out, pass metrics={'weight': w}, and multiply every gradient by "
            "record.divisor / record.metrics['weight'] after the call"
        )
    if abs(number) >= (limit := 2 / torch.finfo(dtype).eps):
        raise ValueError(
            f"sample_size may be rounded: got {number:.0f} as {str(dtype).removeprefix('torch.')}, which holds every "
            f"whole number only below {limit:.0f}; count the items as integers"
        )
    return int(number)


def _name_type(value: object) -> str:
    """The name of the type of ``value``. For an array or a tensor, dtype and shape follow."""
    form = (
        f" of {value.dtype}, shape {tuple(value.shape)}" if hasattr(value, "dtype") and hasattr(value, "shape") else ""
    )
    return f"{type(value).__name__}{form}"


def _require_sample_size(header: Header) -> None:
    if header.participation == Participation.SKIP:
        raise ValueError(
            "skip is not usable with reproducible=True: got True; pass sample_size=0 to leave this rank out"
        )
    if header.participation == Participation.PLAIN:
        raise ValueError(
            "sample_size is missing: got None, expected a number of items, as reproducible=True needs it; sum the loss "
            "over a micro-batch's items, and pass how many items this rank's micro-batches have together"
        )


def _note_step(
    call: Call, counter: BackwardCounter, plan: Plan, grads: Sequence[torch.Tensor | None], header: Header
) -> None:
    """Write to the header what happened since the last call. Refuse gradients that no call may use."""
    if counter.policy.passes.numbers:  # a pass has not ended
        check_complete(counter.incomplete(plan.parameters))
    header.micro_batches = counter.micro_batches
    if counter.was_stepped(plan.parameters):
        header.flags |= Flag.STEPPED
    if counter.may_have_foreign_results and counter.is_after_foreign_call(plan.parameters):
        header.flags |= Flag.REDUCED
    if (
        not (header.micro_batches or counter.accumulations)
        and all(buffer.holds_only_views(grads[share]) for buffer, share in plan.slot_ranges)
        # Zeros count as cleared gradients: a rank without a batch is not a rank that calls twice.
        and have_nonzero(grad for grad in grads if grad is not None and grad.numel())
    ):
        header.flags |= Flag.REPEAT
    if header.participation == Participation.SAMPLES:
        _check_undivided(call, counter, plan, is_repeat=bool(header.flags & Flag.REPEAT))


def _check_undivided(call: Call, counter: BackwardCounter, plan: Plan, *, is_repeat: bool) -> None:
    """Refuse gradients that an earlier call has divided, with or without a backward since."""
    if is_repeat and not any(buffer.was_written for buffer in plan.buffers):
        raise GradientError(
            "the gradients are what the last all_reduce() left and no backward ran since: sample_size would divide "
            "them a second time; call all_reduce() once per step"
        )
    reduced = {
        plan.layout.slots[index].name: grad
        for index in counter.already_reduced(plan.parameters)
        if (grad := plan.parameters[index].grad) is not None
    }
    if have_nonzero(reduced.values()):
        name = next(name for name, grad in reduced.items() if have_nonzero([grad]))
        raise GradientError(
            f"grad of {name!r} was reduced by an earlier call, and no backward reached it since: sample_size would "
            "divide it a second time; got two calls for a parameter that modules share, expected one per step; "
            "give the modules to one call, as parts of one module or with their parameters in one list (a gradient "
            "that you write yourself: assign a new tensor)",
            parameter=name,
        )
    if added := counter.added_to_results(plan.parameters):
        name = plan.layout.slots[added[0]].name
        raise GradientError(
            f"grad of {name!r} holds the result of an earlier call, and a backward was added to it ({len(added)} of "
            f"{len(plan.parameters)} parameters): sample_size would divide that result again in {call}; expected a "
            "gradient made by backward since the last call; call model.zero_grad() between step() and the next "
            f"backward(), or, to add up micro-batches, make one call per step: {_how_to_add_up(call)}"
            f"{_unheld(plan.parameters[added[0]])}",
            parameter=name,
        )


def _how_to_add_up(call: Call) -> str:
    if call.settings.by_environment:  # of the function, whose module has no no_sync()
        return "behind the last micro-batch"
    return "put the earlier micro-batches, with their calls, into no_sync()"


def _unheld(parameter: torch.Tensor) -> str:
    """The likely cause if optimizers hold other tensors than ``parameter``; else empty."""
    optimizers = internals.all_optimizers()
    held = {id(each) for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
    if not optimizers or id(parameter) in held:
        return ""
    return (
        "; no optimizer holds this parameter, and zero_grad() of an optimizer clears what it holds: make the optimizer "
        "of model.parameters() again, after load_state_dict(assign=True) or a new layer"
    )


def pieces_of(plan: Plan, packed: Packed) -> list[torch.Tensor]:
    """The elements of all packed gradients, in as few tensors as possible, of one dimension for dense gradients."""
    pieces = [grad.values() for grad in packed.sparse.values()] if packed.sparse else []
    for (buffer, share), flat in zip(plan.slot_ranges, packed.flats, strict=True):
        kinds = packed.kinds[share]
        if kinds.count(DENSE) == len(kinds) and buffer.bucket.numel:
            pieces.append(flat)
        else:
            pieces += [flat[start:stop] for start, stop in buffer.bucket.runs([kind == DENSE for kind in kinds])]
    return pieces


def norm_of(pieces: Sequence[torch.Tensor], norms: Sequence[float] = ()) -> tuple[float, bool]:
    """2-norm of all pieces together, and whether every element is finite. ``norms``: of each piece, if already read.

    Computed in the dtype of the pieces (at least fp32). If this overflows although every element is finite, in fp64.
    """
    if not norms:
        found = list(map(_norm, pieces))
        is_here = all(map(attrgetter("is_cpu"), found))
        norms = list(map(torch.Tensor.item, found)) if is_here else devices.read_scalars(found)
    norm = math.hypot(*norms)
    if math.isfinite(norm):
        return norm, True
    finite = all(devices.read_scalars([torch.isfinite(piece).all() for piece in pieces]))
    return (math.hypot(*devices.read_scalars([_norm(each, wide=True) for each in pieces])) if finite else norm), finite


def _norm(piece: torch.Tensor, *, wide: bool = False) -> torch.Tensor:
    real = torch.view_as_real(piece) if piece.is_complex() else piece
    narrow = torch.float32 if real.dtype in (torch.float16, torch.bfloat16) else real.dtype
    if wide:
        real, narrow = devices.where_doubles_are(real), torch.float64
    norm: torch.Tensor = torch.linalg.vector_norm(real, dtype=narrow)
    return norm
