"""Exchange of call headers, and the result of a match.

Collective. Nothing here touches a gradient: after an agreed error every ``.grad`` is as before the call, and the next
call may succeed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

import torch

from legacy_ddp._agreement.header import COUNTED_BIT, FAILED_BIT, Flag, Header, Participation, decode_rows, encode_row
from legacy_ddp._agreement.mismatch import LAYOUT_ADVICE, describe_uneven_work, find_failure, find_mismatch
from legacy_ddp._argument_errors import argument_errors
from legacy_ddp._buckets.gradient import ABSENT, DENSE
from legacy_ddp._compare import Finding
from legacy_ddp._error_text import error_text
from legacy_ddp._errors import LegacyDDPError
from legacy_ddp._transport.call import Call

_COMPARED_FIELDS = ("version", "wrapper_id", "operation", "call", "layout", "argument", "participation")
_WORK_FIELDS = ("micro_batches", "flags", "leaves", "random")
_compared = itemgetter(*map(Header._fields.index, _COMPARED_FIELDS + _WORK_FIELDS))


@dataclass(frozen=True)
class Agreement:
    """Matching headers of all ranks. ``headers``: int64, shape (size, HEADER_WORDS). ``rows``: decoded."""

    headers: torch.Tensor
    rows: Sequence[Header]

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all ranks do the same work, without a failure or a tree: then there is nothing else to compare."""
        first = self.rows[0]
        return len(set(map(_compared, self.rows))) == 1 and not first.leaves and not first.flags & FAILED_BIT

    @cached_property
    def has_same_mask(self) -> bool:
        """Whether every rank has gradients of the same kinds in the same slots."""
        return len({row.mask for row in self.rows}) == 1

    @cached_property
    def participants(self) -> tuple[int, ...]:
        """The ranks with counting gradients."""
        return tuple(rank for rank, row in enumerate(self.rows) if row.takes_part)

    @cached_property
    def skipped_ranks(self) -> tuple[int, ...]:
        """All other ranks."""
        return tuple(sorted({*range(len(self.rows))} - {*self.participants}))

    @cached_property
    def sample_size(self) -> int | None:
        """Sum of all sample sizes, None for a plain mean."""
        sizes = [row.sample_size for row in self.rows if row.participation == Participation.SAMPLES]
        return sum(sizes) if sizes else None

    @cached_property
    def divisor(self) -> int:
        """The divisor of the sum over the ranks; 0 without any participant."""
        if self.sample_size is not None:
            return self.sample_size
        counted = sum([bool(row.flags & COUNTED_BIT) for row in self.rows])
        return len(self.participants) + counted if self.participants else 0

    def uneven_work(self) -> Finding | None:
        """Different numbers of micro-batches, if the participants differ."""
        return None if self.is_uniform else describe_uneven_work(self.rows)


@contextmanager
def announcing_failures(call: Call) -> Iterator[None]:
    """Run local work. A failure reaches the waiting ranks in a header before the exception leaves.

    Raises:
        PeerError: some ranks failed, or all with different errors; the same text on every rank.
        Exception: the local exception, unchanged, if every rank failed with the same text: then no rank waits.
    """
    try:
        call.prepare_watchdog()
        with argument_errors:
            yield
    except Exception as error:
        if isinstance(error, LegacyDDPError) and error.call is None:
            error.call, error.phase = call.number, call.phase_name
        header = Header(wrapper_id=call.wrapper_id, operation=call.operation, call=call.number, flags=Flag.FAILED)
        with call.phase("agree"):
            rows = decode_rows(call.exchange_headers(encode_row(header)))
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
    uneven: str = "allow",
    metrics: Sequence[str] = (),
    layout_advice: str = LAYOUT_ADVICE,
) -> Agreement:
    """Exchange headers, and return them if they match.

    ``header`` needs no version, wrapper_id, operation or call: ``call`` has them. ``header.layout`` is the fingerprint
    of ``inventory``. ``metrics``: the names behind ``header.argument`` of an all_reduce. ``layout_advice``: the next
    step in the text of a LayoutError.

    Raises:
        PeerError: a rank failed before the exchange.
        DesyncError: a different wrapper, operation or call; sample_size on some ranks only; a skipped or extra call;
            with ``uneven="raise"`` different numbers of micro-batches; a split of micro-batches unsuitable for a tree;
            different names of metrics.
        LayoutError: a different inventory.
    """
    header = header._replace(wrapper_id=call.wrapper_id, operation=call.operation, call=call.number)
    with call.phase("agree"):
        headers = call.exchange_headers(encode_row(header))
        agreement = Agreement(headers, decode_rows(headers))
        if not agreement.is_uniform:
            problem = find_mismatch(call, agreement.rows, inventory, uneven, metrics, layout_advice=layout_advice)
            if problem is not None:
                raise problem
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
