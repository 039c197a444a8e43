"""Exchange of call headers, and the result of a match.

Collective. Nothing here touches a gradient: after an agreed error every ``.grad`` is as before the call, and the next
call may succeed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, reduce
from operator import and_, or_

import torch

from legacy_ddp._agreement.header import (
    ALIKE,
    PLACES,
    Flag,
    Header,
    Participation,
    column,
    decode_header,
    encode_header,
    flags_of,
    is_equal,
)
from legacy_ddp._agreement.mismatch import LAYOUT_ADVICE, Mismatch, Precedence, find_failure, find_mismatch
from legacy_ddp._argument_errors import add_explanation
from legacy_ddp._buckets.flat_buffer import ABSENT, DENSE
from legacy_ddp._error_text import error_text
from legacy_ddp._errors import LegacyDDPError
from legacy_ddp._transport.call import Call


class Agreement:
    """Matching headers of all ranks.

    ``packed``: the bytes of each header. ``own``: the header of this rank. ``some_flags``, ``common_flags``: the flags
    that any rank has, and that all ranks have. ``is_uniform``: all ranks do the same work, without a failure or a tree,
    and there is nothing else to compare. ``has_same_mask``: all ranks have gradients of the same kinds in the same
    slots. ``participants``: the ranks with counting gradients. ``skipped_ranks``: all other ranks. ``sample_size``: the
    sum of all sample sizes, None for a plain mean. ``divisor``: of the sum over the ranks; 0 without any participant.

    Headers are decoded only if their bytes differ where most calls have equal bytes, or if somebody reads them.
    """

    def __init__(self, packed: Sequence[bytes], own: Header) -> None:
        self.packed = packed
        self.own = own
        are_alike = is_equal(packed, ALIKE)
        self.has_same_mask = is_equal(packed, PLACES["mask"])
        self.is_uniform = are_alike and not own.leaves and not own.flags & Flag.FAILED
        self.some_flags = self.common_flags = own.flags
        self.participants: Sequence[int] = range(len(packed))
        self.skipped_ranks: tuple[int, ...] = ()
        self.sample_size: int | None = None
        self.divisor = len(packed)
        if not are_alike or own.participation != Participation.PLAIN:
            self._count()

    def _count(self) -> None:
        """Count the ranks that take part, and their items."""
        flags = flags_of(self.packed)
        self.some_flags, self.common_flags = reduce(or_, flags), reduce(and_, flags)
        self.participants = tuple(rank for rank, row in enumerate(self.rows) if row.takes_part)
        self.skipped_ranks = tuple(rank for rank, row in enumerate(self.rows) if not row.takes_part)
        sizes = [row.sample_size for row in self.rows if row.participation == Participation.SAMPLES]
        if sizes:
            self.sample_size = self.divisor = sum(sizes)
        else:
            counted = len(self.ranks_with(Flag.COUNTED))
            self.divisor = len(self.participants) + counted if self.participants else 0

    @cached_property
    def rows(self) -> Sequence[Header]:
        """The headers of all ranks, decoded."""
        return [decode_header(row) for row in self.packed]

    def ranks_with(self, flag: int) -> list[int]:
        """The ranks with the flag."""
        return [rank for rank, flags in enumerate(flags_of(self.packed)) if flags & flag]

    def is_equal(self, name: str) -> bool:
        """Whether the fact ``name`` is equal on all ranks."""
        return is_equal(self.packed, PLACES[name])

    def column(self, name: str) -> list[int]:
        """The fact ``name`` of every rank."""
        return column(self.packed, name)


@contextmanager
def announcing_failures(call: Call) -> Iterator[None]:
    """Run local work. A failure reaches the waiting ranks in a header before the exception leaves.

    Raises:
        PeerError: some ranks failed, or all with different errors; the same text on every rank.
        Exception: the local exception, unchanged, if every rank failed with the same text: then no rank waits.
    """
    try:
        if not call.groups.endpoints_exchanged:
            call.prepare_watchdog()
        yield
    except Exception as error:
        add_explanation(error)
        if isinstance(error, LegacyDDPError) and error.call is None:
            error.call, error.phase = call.number, call.phase_name
        header = Header(wrapper_id=call.wrapper_id, operation=call.operation, call=call.number, flags=Flag.FAILED)
        with call.phase("agree"):
            rows = [decode_header(row) for row in call.exchange_headers(encode_header(header))]
            problem = find_failure(call, rows, error_text(error))
        if problem is None:
            call.mark_finished()
            raise
        raise problem from error


def agree(
    call: Call,
    header: Header,
    inventory: Mapping[str, str],
    *,
    mismatches: Sequence[tuple[Precedence, Mismatch]] = (),
    metrics: Sequence[str] = (),
    layout_advice: str = LAYOUT_ADVICE,
) -> Agreement:
    """Exchange headers, and return them if they match.

    ``header`` needs no version, wrapper_id, operation or call: ``call`` has them. ``header.layout`` is the fingerprint
    of ``inventory``. ``mismatches``: of the checks. ``metrics``: the names behind ``header.metric_names``.
    ``layout_advice``: the next step in the text of a LayoutError.

    Raises:
        PeerError: a rank failed before the exchange.
        DesyncError: a different wrapper, operation or call; sample_size on some ranks only; a skipped or extra call;
            with ``uneven="raise"`` different numbers of micro-batches; a split of micro-batches unsuitable for a tree;
            different names of metrics.
        LayoutError: a different inventory.
    """
    header.wrapper_id, header.operation, header.call = call.wrapper_id, call.operation, call.number
    with call.phase("agree"):
        agreement = Agreement(call.exchange_headers(encode_header(header)), header)
        if not agreement.is_uniform:
            problem = find_mismatch(call, agreement.rows, inventory, mismatches, metrics, layout_advice=layout_advice)
            if problem is not None:
                raise problem
        if not call.groups.endpoints_exchanged:
            call.exchange_endpoints()
    call.group_state.waited_seconds = call.seconds["agree"]
    return agreement


def agree_on_kinds(call: Call, agreement: Agreement, kinds: Sequence[int]) -> list[int]:
    """The kind of every reduced gradient: absent if absent on every rank, dense if ranks hold different kinds.

    ``kinds``: the kinds on this rank. Collective only if the headers show different kinds: 2 bytes a slot, whatever the
    number of ranks.
    """
    if agreement.has_same_mask:
        return list(kinds)
    own = torch.tensor(kinds, dtype=torch.uint8, device="cpu")
    # One maximum gives both ends: the largest kind, and 255 minus the smallest kind that is not absent.
    lowest = torch.where(own == ABSENT, 0, 255 - own)
    with call.phase("agree"):
        ends = call.maximum(torch.stack([own, lowest.to(torch.uint8)]))
    largest, smallest = ends[0], 255 - ends[1]
    return [int(kind) for kind in torch.where((largest == ABSENT) | (largest == smallest), largest, DENSE)]
