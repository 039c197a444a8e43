"""The choice of the transport for the dense gradients on CPU: memory shared by the ranks of a host, or gloo.

The first all_reduce of a wrapper on a group decides, equally on all ranks. The choice stays; only with
``transport="auto"`` a later failure of shared memory changes it to gloo, once.
"""

from collections.abc import Callable, Sequence

from legacy_ddp._buckets.flat_buffer import FlatBuffer
from legacy_ddp._buckets.plan import Plan, Planner
from legacy_ddp._buckets.segment import Segment, SegmentPolicy
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._error_text import error_line
from legacy_ddp._errors import TransportError
from legacy_ddp._log import log_transport
from legacy_ddp._reproducible.splits import why_no_nodes
from legacy_ddp._settings import Settings
from legacy_ddp._transport.call import Call, GroupState
from legacy_ddp._transport.host_row import MAX_BUCKETS, SegmentIds
from legacy_ddp._transport.peer_memory import PeerMemory

HOST, GLOO = "host", "gloo"


def prepare_transport(state: GroupState, planner: Planner) -> None:
    """Let the flat tensors lie in segments from the next allocation on, if the group may use the host transport."""
    settings = planner.settings
    is_open = not state.transport or (state.transport == HOST and settings.comm_hook is not None)
    if state.groups.size > 1 and is_open and settings.transport != HOST and (reason := _why_gloo(state, settings)):
        state.transport, state.fallback, state.peer_memory = GLOO, reason, None
        log_transport(state.groups.rank, state.transport_text)
    segments = planner.segments
    segments.wanted = state.groups.star is not None and state.transport != GLOO
    segments.chosen = state.transport == HOST
    segments.problem = ""  # of an earlier call, perhaps on another group


def require_host(call: Call, settings: Settings) -> None:
    """Refuse ``transport="host"`` where the ranks cannot share memory.

    Raises:
        TransportError: on all ranks, with the reason.
    """
    if settings.transport == HOST and call.groups.size > 1 and (reason := _why_gloo(call.group_state, settings)):
        raise _impossible(call, reason)


def segments_of(plan: Plan, packed: Packed, problem: str) -> list[Segment | None]:
    """The segments shared by this rank in a call, by position (:class:`SegmentIds`). Empty after a ``problem``."""
    if problem:
        return []
    pairs = zip(plan.buffers, packed.segments, strict=True) if packed.segments else ()
    return [buffer.segment for buffer in host_buffers(plan)] + [sums for buffer, sums in pairs if _is_on_host(buffer)]


def ids_of(plan: Plan, segments: Sequence[Segment | None]) -> SegmentIds:
    """The message about ``segments`` to the other ranks."""
    serials = tuple(0 if segment is None else segment.serial for segment in segments)
    # After another number of micro-batches the sum lies in its own segment again.
    may_come_back = None in segments or any(buffer.has_spare for buffer in host_buffers(plan))
    return SegmentIds(serials, may_come_back)


def host_buffers(plan: Plan) -> list[FlatBuffer]:
    """The buffers that may lie in segments: on CPU, with elements."""
    return [buffer for buffer in plan.buffers if _is_on_host(buffer)]


def choose_transport(
    call: Call,
    settings: Settings,
    plan: Plan,
    own: Sequence[Segment | None],
    policy: SegmentPolicy,
    allocate_for_gloo: Callable[[], None],
) -> tuple[bool, str]:
    """Collective, after headers matched: whether the host transport carries this call, and a warning if it did before.

    New segments are mapped. ``own``: the segments of this rank. ``allocate_for_gloo``: gives this rank the memory that
    gloo needs after the host transport. The warning is equal on all ranks, and empty without a reason to warn.

    Raises:
        TransportError: on all ranks: ``transport="host"`` is not possible, or not possible any more; or gloo has no
            memory, and the next call tries again.
    """
    state, segments, buffers = call.group_state, call.peer_segments, host_buffers(plan)
    if state.transport == GLOO or segments is None or not buffers:
        return False, ""
    memory = state.peer_memory or PeerMemory(call.groups.size)
    reason = _first_problem(call, segments, len(buffers), policy.problem)
    if not reason:
        memory.forget_unused(segments)
        unknown = memory.unknown(segments)
        if any(unknown):
            reason = memory.map_new(call, segments, unknown, own)
    if reason and settings.transport == HOST:
        raise _impossible(call, reason)
    was_on_host = state.transport == HOST
    if reason or not was_on_host:
        state.transport, state.fallback = (GLOO, reason) if reason else (HOST, "")
        state.peer_memory = None if reason else memory
        log_transport(call.groups.rank, state.transport_text)
    return not reason, _leave_host(call, policy, allocate_for_gloo) if reason and was_on_host else ""


def _leave_host(call: Call, policy: SegmentPolicy, allocate: Callable[[], None]) -> str:
    """Prepare gloo for gradients that were packed for the host transport. Returns a warning, once per group."""
    policy.wanted = policy.chosen = False
    problem = ""
    try:
        allocate()
    except (OSError, RuntimeError, MemoryError) as error:
        problem = error_line(error)
    if problem := call.first_problem(problem):
        raise TransportError(
            f"{call}: no memory for gloo, after shared memory has failed ({call.group_state.fallback}): {problem}; "
            "give the job more memory, or a model with fewer parameters to each rank",
            call=call.number,
            phase="agree",
        )
    if call.groups.is_fallback_told:
        return ""
    call.groups.is_fallback_told = True
    return (
        f"{call}: shared memory is not possible any more (warned once):\n{call.group_state.fallback}\n"
        "gloo carries the gradients of this model from now on: slower, and with sums that may be rounded in another\n"
        'order; mend the cause and start again, or pass transport="gloo"'
    )


def _is_on_host(buffer: FlatBuffer) -> bool:
    return buffer.bucket.device.type == "cpu" and buffer.bucket.numel > 0


def _why_gloo(state: GroupState, settings: Settings) -> str:
    """Why the host transport is not possible, as far as is known before a call; empty if it may be."""
    if settings.transport == GLOO:
        return 'transport="gloo"'
    if settings.comm_hook is not None:
        return "a communication hook"
    if state.groups.between is not None and settings.reproducible and (reason := why_no_nodes(state.groups.hosts)):
        return f"reproducible=True: {reason}"
    return state.groups.star_problem


def _first_problem(call: Call, segments: Sequence[SegmentIds], count: int, problem: str) -> str:
    """Why some rank has no segment in place of a flat tensor."""
    if count > MAX_BUCKETS:
        return f"{count} buckets, more than {MAX_BUCKETS}"
    if all(all(current.serials[:count]) for current in segments):
        return ""
    return call.first_problem(problem) or "a rank has no shared memory yet"


def _impossible(call: Call, reason: str) -> TransportError:
    any_more = " any more" if call.group_state.transport == HOST else ""
    return TransportError(
        f'{call}: transport="host" is not possible{any_more}: {reason}; mend the cause, or pass transport="auto"',
        call=call.number,
        phase="agree",
    )
