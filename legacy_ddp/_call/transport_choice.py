"""The transport of dense gradients, and the route of all gradients: the reducers that sum and divide them.

The transport is memory shared by the ranks of a host, gloo, or the user's group for a device.

For gradients on CPU, the first all_reduce of a wrapper on a group chooses shared memory or gloo, the same on all ranks.
The choice stays. Only a later failure of shared memory changes it to gloo, with ``transport="auto"``.
"""

from collections.abc import Sequence
from functools import partial

from legacy_ddp._call.check import Warnings
from legacy_ddp._call.comm_hook import HookReducer
from legacy_ddp._call.host_sum import BetweenHostsReducer, HostReducer, PeerMemory
from legacy_ddp._call.pack import Packed, allocate_for_gloo
from legacy_ddp._call.reduce import GroupReducer, GroupTreeReducer, Payload, Reducer, reduce_sparse
from legacy_ddp._errors import TransportError
from legacy_ddp._log import log_transport
from legacy_ddp._memory.flat_buffer import ABSENT, SPARSE
from legacy_ddp._memory.layout import Layout
from legacy_ddp._memory.plan import Plan, Planner
from legacy_ddp._memory.segment import Segment
from legacy_ddp._ranks.agree import Agreement, agree_on_kinds
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.header import MAX_BUCKETS, SegmentIds, decode_segments
from legacy_ddp._ranks.private_groups import Groups
from legacy_ddp._ranks.tree_reduce import why_no_nodes
from legacy_ddp._reproducible import Leaves
from legacy_ddp._settings import Settings
from legacy_ddp._text import error_line

HOST, GLOO = "host", "gloo"


class Route:
    """The reducers of the dense gradients of a layout, in order. ``transport``: of dense gradients on CPU."""

    def __init__(self, layout: Layout, transport: str, parts: Sequence[Reducer]) -> None:
        self.layout = layout
        self.transport = transport
        self._parts = parts
        self._devices = [*dict.fromkeys(bucket.device for bucket in layout.buckets if bucket.device.type != "cpu")]
        self._preparing = [part for part in parts if type(part).prepare is not Reducer.prepare]

    def reduce(self, call: Call, plan: Plan, packed: Packed, agreement: Agreement) -> Payload:
        """Collective: sum the packed gradients over the ranks and divide.

        Raises:
            CommHookError: the result of the hook cannot be a gradient. No gradient changed.
            LostPeerError: a rank was lost. The content of the flat tensors is then undefined, as after an interrupt.
        """
        if agreement.divisor == 0:
            return Payload(plan, packed, self.transport, [ABSENT] * len(packed.kinds), has_same_mask=True, divisor=0)
        kinds = packed.kinds if agreement.has_same_mask else agree_on_kinds(call, packed.kinds)
        payload = Payload(plan, packed, self.transport, kinds, agreement.has_same_mask, agreement.divisor)
        for part in self._preparing:
            part.prepare(call, payload)
        with call.payload(self._devices) if self._devices else call.phase("payload"):
            for part in self._parts:
                payload.size_bytes += part.reduce(call, payload)
            if max(kinds, default=ABSENT) >= SPARSE:
                payload.size_bytes += reduce_sparse(call, payload)
        return payload


class Transport:
    """The transport of the gradients of a wrapper on a group.

    A call uses the methods in this order: :meth:`before_pack`, :meth:`announce`, with the header, then
    :meth:`require_host` and :meth:`settle`, whose route reduces the gradients.
    """

    def __init__(self, groups: Groups, planner: Planner, leaves: Leaves | None, warnings: Warnings) -> None:
        self._groups = groups
        self._planner = planner
        self._leaves = leaves
        self._warnings = warnings
        self._choice = ""  # HOST or GLOO for dense gradients on CPU; empty before the choice
        self._fallback = ""  # why not HOST
        self._memory: PeerMemory | None = None  # with HOST
        self._route: Route | None = None  # of the last call

    def before_pack(self) -> None:
        """Allocate flat tensors in shared memory from now on, if the group may use it."""
        settings, segments = self._planner.settings, self._planner.segments
        is_open = not self._choice or (self._choice == HOST and settings.comm_hook is not None)
        if is_open and self._groups.size > 1 and settings.transport != HOST and (reason := self._why_gloo(settings)):
            self._choose(GLOO, reason)
        segments.wanted = self._groups.size > 1 and not self._groups.host_problem and self._choice != GLOO
        segments.chosen = self._choice == HOST
        segments.problem = ""  # of an earlier call, perhaps on another group

    def announce(self, plan: Plan, packed: Packed) -> SegmentIds:
        """What the other ranks must know about the segments of this rank."""
        segments, serials = self._own_segments(plan, packed), []
        # None: the sum is in ordinary memory. With another number of micro-batches it may be in its segment again.
        may_come_back = None in segments
        for segment in segments:
            serials.append(0 if segment is None else segment.serial)
        for index in plan.layout.shared_buckets:
            may_come_back = may_come_back or plan.buffers[index].spare is not None
        return SegmentIds(tuple(serials), may_come_back)

    def require_host(self, call: Call) -> None:
        """Raise a TransportError, on all ranks, if ``transport="host"`` is set and the ranks cannot share memory."""
        settings = self._planner.settings
        if settings.transport == HOST and self._groups.size > 1 and (reason := self._why_gloo(settings)):
            raise self._impossible(call, reason)

    def settle(self, call: Call, plan: Plan, packed: Packed) -> Route:
        """The route of the gradients of this call. Collective if a rank has a new segment.

        A change from shared memory to gloo is a warning, equal on all ranks.

        Raises:
            TransportError: on all ranks: ``transport="host"`` is not possible (any more); or gloo has no memory, and
                the next call tries again.
        """
        segments = call.peer_segments
        if self._choice != GLOO and segments is not None and plan.layout.shared_buckets:
            memory = self._memory
            if memory is None or memory.settled != segments:
                memory = self._share(call, plan, packed, segments)
        else:
            memory = None
        transport = HOST if memory is not None else GLOO if self._groups.size > 1 else ""
        route = self._route  # kept from call to call; other settings make a new layout
        if route is None or route.layout is not plan.layout or route.transport != transport:
            parts = self._dense_parts(plan.layout, memory)
            route = self._route = Route(plan.layout, transport, parts)
        return route

    @property
    def text(self) -> str:
        """The transport, with the reason for a fallback; empty for a single rank."""
        if self._groups.size == 1 or self._choice or self._groups.host_problem:
            return self.expected_text
        return f"{self.expected_text} (from the first call on)"

    @property
    def expected_text(self) -> str:
        """As :attr:`text`. Before the first call: what it will choose, unless memory is missing."""
        if self._groups.size == 1:
            return ""
        if self._choice:
            note = self._fallback or self._groups.hosts_text
            return f"{self._choice} ({note})" if note else self._choice
        return f"gloo ({self._groups.host_problem})" if self._groups.host_problem else "host"

    def _choose(self, choice: str, fallback: str = "", memory: PeerMemory | None = None) -> None:
        self._choice, self._fallback, self._memory = choice, fallback, memory
        log_transport(self._groups.rank, self.text)

    def _why_gloo(self, settings: Settings) -> str:
        """Why shared memory is not possible, as far as is known before a call; empty if it may be possible."""
        if settings.transport == GLOO:
            return 'transport="gloo"'
        if settings.comm_hook is not None:
            return "a communication hook"
        groups = self._groups
        if groups.between is not None and settings.reproducible and (reason := why_no_nodes(groups.hosts)):
            return f"reproducible=True: {reason}"
        return groups.host_problem

    def _impossible(self, call: Call, reason: str) -> TransportError:
        any_more = " any more" if self._choice == HOST else ""
        return TransportError(
            f'{call}: transport="host" is not possible{any_more}: {reason}; mend the cause, or '
            f"{call.settings.how_to_carry('auto')}",
            call=call.number,
            phase="agree",
        )

    def _own_segments(self, plan: Plan, packed: Packed) -> list[Segment | None]:
        """The segments of this rank in a call, by position (:class:`SegmentIds`). Empty after a failure to make one."""
        if self._planner.segments.problem:
            return []
        shared = plan.layout.shared_buckets
        segments: list[Segment | None] = []
        for index in shared:
            segments.append(plan.buffers[index].views.segment)
        return segments + [packed.segments[index] for index in shared] if packed.segments else segments

    def _share(self, call: Call, plan: Plan, packed: Packed, segments: bytes) -> PeerMemory | None:
        """Collective: the memory with the exchanged ``segments`` of all ranks; None: gloo is the choice from now on."""
        memory, was_on_host = self._memory or PeerMemory(self._groups.size), self._choice == HOST
        own = partial(self._own_segments, plan, packed)
        reason = self._problem_of(call, plan.layout, decode_segments(segments)) or memory.settle(call, segments, own)
        if not reason:
            if not was_on_host:
                self._choose(HOST, memory=memory)
            return memory
        if self._planner.settings.transport == HOST:
            raise self._impossible(call, reason)
        self._choose(GLOO, reason)
        if was_on_host:
            self._leave_host(call, plan, packed)
        return None

    def _problem_of(self, call: Call, layout: Layout, segments: Sequence[SegmentIds]) -> str:
        """Why a flat tensor of some rank is in no segment; empty if all are. Collective if one is in none."""
        count = len(layout.shared_buckets)
        if count > MAX_BUCKETS:
            return f"{count} buckets, more than {MAX_BUCKETS}"
        if all(all(current.serials[:count]) for current in segments):
            return ""
        return call.first_problem(self._planner.segments.problem) or "a rank has no shared memory yet"

    def _leave_host(self, call: Call, plan: Plan, packed: Packed) -> None:
        """Collective: prepare gloo for gradients that were packed for shared memory. Warns once per group."""
        policy = self._planner.segments
        policy.wanted = policy.chosen = False
        problem = ""
        try:
            allocate_for_gloo(call, self._leaves, plan, packed)
        except (OSError, RuntimeError, MemoryError) as error:
            problem = error_line(error)
        if problem := call.first_problem(problem):
            raise TransportError(
                f"{call}: no memory for gloo, after shared memory has failed ({self._fallback}): {problem}; "
                "give the job more memory, or a model with fewer parameters to each rank",
                call=call.number,
                phase="agree",
            )
        if self._groups.is_fallback_told:
            return
        self._groups.is_fallback_told = True
        text = (
            f"{call}: shared memory is not possible any more (warned once):\n{self._fallback}\n"
            "gloo carries the gradients of this model from now on: slower, and with sums that may be rounded in another"
            f"\norder; mend the cause and start again, or {call.settings.how_to_carry('gloo')}"
        )
        self._warnings.add(call, text, "Shared memory has failed", is_everywhere=True)

    def _dense_parts(self, layout: Layout, memory: PeerMemory | None) -> list[Reducer]:
        every, settings = range(len(layout.buckets)), self._planner.settings
        if settings.comm_hook is not None:
            return [HookReducer(every, settings.comm_hook)]
        parts: list[Reducer] = []
        if memory is not None:
            kind = HostReducer if self._groups.between is None else BetweenHostsReducer
            parts.append(kind(layout.shared_buckets, memory, settings))
        rest = [index for index in every if memory is None or index not in layout.shared_buckets]
        if rest and self._leaves is not None:
            parts.append(GroupTreeReducer(rest, self._leaves.sums))
        elif rest:
            parts.append(GroupReducer(rest))
        return parts
