"""Do all ranks mean the same call? Headers are exchanged and compared; whatever is wrong is the same error everywhere.

Collective. Nothing here touches a gradient: after any error raised from this file every ``.grad`` is as it was and the
next call may go on.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch

from legacy_ddp._agreement.header import Flag, Header, Part, decode_rows, encode_row
from legacy_ddp._buckets.gradient import ABSENT, DENSE
from legacy_ddp._compare import Finding, compare_rows, name_ranks
from legacy_ddp._error_text import error_text
from legacy_ddp._errors import AgreedError, DesyncError, LayoutError, LegacyDDPError, PeerError
from legacy_ddp._reproducible.splits import format_splits, is_aligned
from legacy_ddp._transport.call import Call


@dataclass(frozen=True)
class Agreement:
    """What all ranks know after their headers matched. ``headers``: int64, shape (size, HEADER_WORDS)."""

    headers: torch.Tensor
    rows: Sequence[Header]

    @cached_property
    def participants(self) -> tuple[int, ...]:
        """The ranks whose gradients count."""
        return tuple(rank for rank, row in enumerate(self.rows) if row.takes_part)

    @property
    def skipped_ranks(self) -> tuple[int, ...]:
        """The ranks whose gradients do not."""
        return tuple(rank for rank, row in enumerate(self.rows) if not row.takes_part)

    @property
    def sample_size(self) -> int | None:
        """Sum of all sample sizes, None for a plain mean."""
        given = [row.samples for row in self.rows if row.samples is not None]
        return sum(given) if given else None

    @property
    def divisor(self) -> int:
        """What the sum over the ranks is divided by; 0 if nobody took part."""
        if self.sample_size is not None:
            return self.sample_size
        counted = sum(bool(row.flags & Flag.COUNTED) for row in self.rows)
        return len(self.participants) + counted if self.participants else 0


@contextmanager
def announcing_failures(call: Call) -> Iterator[None]:
    """Run local work that may fail; a failure is shown to the waiting ranks before it leaves.

    Raises:
        PeerError: this rank failed, or some did, each in its own way; the same text on every rank.
        Exception: what failed here, unchanged, if every rank failed with the same words: then nobody waits.
    """
    try:
        call.prepare()
        yield
    except Exception as error:
        if isinstance(error, LegacyDDPError) and error.call is None:
            error.call, error.phase = call.number, call.phase_name
        header = Header(member=call.member, operation=call.operation, call=call.number, flags=Flag.FAILED)
        with call.phase("agree"):
            rows = decode_rows(call.gather(encode_row(header)))
            problem = _find_failure(call, rows, error_text(error))
        if problem is None:
            call.settle()
            raise
        raise problem from error


def agree(call: Call, header: Header, inventory: Mapping[str, str], *, uneven: str = "allow") -> Agreement:
    """Exchange headers; return what they say if they match.

    ``header`` needs no version, member, operation or call: the call knows them. ``inventory`` is what ``header.layout``
    is the fingerprint of.

    Raises:
        PeerError: a rank failed before the exchange.
        DesyncError: another wrapper, operation or call; None against int sample_size; a skipped or an extra call; with
            ``uneven="raise"`` other numbers of micro-batches; leaves that ranks do not split as a tree needs it.
        LayoutError: another inventory.
    """
    header = header._replace(member=call.member, operation=call.operation, call=call.number)
    with call.phase("agree"):
        headers = call.gather(encode_row(header))
        rows = decode_rows(headers)
        problem = (
            _find_failure(call, rows, "")
            or _find_other_call(rows)
            or _find_other_layout(call, rows, inventory)
            or find_other_meaning(rows, uneven)
        )
        if problem is not None:
            raise problem
        call.meet()
    call.seat.waited_seconds = call.seconds["agree"]
    return Agreement(headers, rows)


def agree_on_kinds(call: Call, agreement: Agreement, kinds: Sequence[int]) -> list[int]:
    """The kind of every reduced gradient: absent where nobody has one, dense where ranks hold different kinds.

    ``kinds`` are this rank's. Collective only if the headers showed that they differ; then 2 bytes a slot, whatever the
    number of ranks.
    """
    if len({row.mask for row in agreement.rows}) == 1:
        return list(kinds)
    own = torch.tensor(kinds, dtype=torch.uint8, device="cpu")
    # One maximum gives both ends: the largest kind, and 255 minus the smallest kind that is not absent.
    lowest = torch.where(own == ABSENT, 0, 255 - own)
    with call.phase("agree"):
        ends = call.maximum(torch.stack([own, lowest.to(torch.uint8)]))
    largest, smallest = ends[0], 255 - ends[1]
    return [int(kind) for kind in torch.where((largest == ABSENT) | (largest == smallest), largest, DENSE)]


def describe_uneven_work(rows: Sequence[Header]) -> Finding:
    """Who brings how many micro-batches, if those who take part differ; a block of ``reproducible=True`` is one, even
    an empty block."""
    return _describe_counts(rows, [row.leaves or row.micro_batches for row in rows])


def _describe_counts(rows: Sequence[Header], micro_batches: Sequence[int]) -> Finding:
    taking_part = [rank for rank, row in enumerate(rows) if row.takes_part]
    if len({micro_batches[rank] for rank in taking_part}) <= 1:
        return Finding(())
    counts = [{"micro-batches since the last call": str(micro_batches[rank])} for rank in taking_part]
    return compare_rows(counts, taking_part)


def _describe_backwards(rows: Sequence[Header]) -> Finding:
    """Who ran how many backward passes, if those who take part differ."""
    return _describe_counts(rows, [row.micro_batches for row in rows])


def _find_failure(call: Call, rows: Sequence[Header], own: str) -> AgreedError | None:
    failed = [rank for rank, row in enumerate(rows) if row.flags & Flag.FAILED]
    if not failed:
        return None
    texts = call.gather_texts(own)
    if len(failed) == len(rows) and len(set(texts)) == 1:
        return None
    said = "; ".join(f"rank {rank}: {texts[rank]}" for rank in failed)
    what = f"{name_ranks(failed)} failed before the exchange, so nothing was exchanged and no gradient changed. {said}"
    return _error(PeerError, rows, what, failed)


def _find_other_call(rows: Sequence[Header]) -> AgreedError | None:
    if len({(row.version, row.member, row.operation, row.call, row.argument) for row in rows}) == 1:
        return None
    finding = compare_rows(
        [
            {
                "header version": str(row.version),
                "wrapper": f"number {row.member} on this group",
                "call": row.call_name,
                "src": str(row.argument),
            }
            for row in rows
        ]
    )
    what = f"ranks met in different calls:\n{finding}\nlet every rank make the same calls in the same order"
    return _error(DesyncError, rows, what, finding.ranks)


def _find_other_layout(call: Call, rows: Sequence[Header], inventory: Mapping[str, str]) -> AgreedError | None:
    if len({row.layout for row in rows}) == 1:
        return None
    finding = compare_rows([json.loads(text) for text in call.gather_bytes(json.dumps(dict(inventory)).encode())])
    what = f"ranks hold different things:\n{finding}\nmake the module and the settings alike on every rank"
    error = _error(LayoutError, rows, what, finding.ranks)
    names = [item.what for item in finding.differences]
    if len(names) == 1 and names[0].startswith("parameter "):
        error.parameter = names[0].removeprefix("parameter ").strip("'")
    return error


def find_other_meaning(rows: Sequence[Header], uneven: str) -> AgreedError | None:
    """Ranks are in the same all_reduce() but do not mean the same by it.

    Facts, which are evidence against a rank, come before what only a count of ranks can attribute.
    """
    if repeating := _ranks_alone_with(Flag.REPEAT, rows):
        return _slipped(rows, repeating, "no backward since the last call, gradients as it left them: an extra call")
    stepping = _ranks_alone_with(Flag.STEPPED, rows)
    # Weights change for other reasons, too; that and more backward passes than elsewhere is a step that nobody shared.
    if stepping and _describe_backwards(rows):
        return _slipped(rows, stepping, "weights changed between its first backward and now: a skipped call")
    if mixed := _find_mixed_parts(rows):
        return mixed
    bad_split, ranks = _describe_bad_split(rows)
    if bad_split:
        return _error(DesyncError, rows, bad_split, ranks)
    if uneven == "raise" and (finding := describe_uneven_work(rows)):
        return _error(DesyncError, rows, f"ranks bring uneven work:\n{finding}", finding.ranks)
    return None


def _find_mixed_parts(rows: Sequence[Header]) -> AgreedError | None:
    meant = {Part.PLAIN: "sample_size=None", Part.SAMPLES: "an int sample_size"}
    ranks = [rank for rank, row in enumerate(rows) if row.part != Part.SKIP]
    finding = compare_rows([{"argument": meant[Part(rows[rank].part)]} for rank in ranks], ranks)
    if not finding:
        return None
    what = f"plain and weighted calls met:\n{finding}\npass sample_size= on every rank or on none"
    return _error(DesyncError, rows, what, finding.ranks)


def _describe_bad_split(rows: Sequence[Header]) -> tuple[str, tuple[int, ...]]:
    """What is wrong with the split that the ranks bring, and which are at fault; empty if nothing.

    A rank that takes no part brings zeros, as many as the others.
    """
    ranks = [rank for rank, row in enumerate(rows) if row.takes_part]
    most = max((rows[rank].leaves for rank in ranks), default=0)
    finding = compare_rows([{"micro-batches": str(rows[rank].leaves)} for rank in ranks], ranks)
    if not most or (not finding and is_aligned(len(rows), most)):
        return "", ()
    total = len(rows) * most
    found = str(finding) if finding else f"  {most} on each of {len(rows)} ranks, which is no power of two"
    return (
        f"micro-batches are not shared out as a tree needs it:\n{found}\n{format_splits(total)}",
        finding.ranks,
    )


def _ranks_alone_with(flag: Flag, rows: Sequence[Header]) -> list[int]:
    """The ranks of which a fact is true; nobody if it is true of all that take part, for then it is how they train."""
    ranks = [rank for rank, row in enumerate(rows) if row.takes_part and row.flags & flag]
    return ranks if len(ranks) < sum(row.takes_part for row in rows) else []


def _slipped(rows: Sequence[Header], ranks: Sequence[int], reading: str) -> AgreedError:
    lines = [f"{name_ranks(ranks)}: {reading}", str(_describe_backwards(rows))]
    lines.append("call all_reduce() once per step on every rank")
    return _error(DesyncError, rows, "\n".join(line for line in lines if line), ranks)


def _error(kind: type[AgreedError], rows: Sequence[Header], what: str, ranks: Sequence[int]) -> AgreedError:
    """The same error on every rank: made from the rows alone, and without a call where ranks are in different ones."""
    names = {row.call_name for row in rows}
    shared = len(names) == 1
    text = f"{names.pop()}: {what}" if shared else what[0].upper() + what[1:]
    return kind(text, ranks=ranks, call=rows[0].call if shared else None, phase="agree")
