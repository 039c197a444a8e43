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

from legacy_ddp._bucket import ABSENT, DENSE
from legacy_ddp._call import Call
from legacy_ddp._compare import Finding, compare_rows, name_ranks
from legacy_ddp._errors import AgreedError, DesyncError, LayoutError, PeerError
from legacy_ddp._header import Flag, Header, Operation, Part, decode_rows, encode_row
from legacy_ddp._layout import fingerprint


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
        return len(self.participants) if self.sample_size is None else self.sample_size


@contextmanager
def announcing_failures(call: Call) -> Iterator[None]:
    """Run local work that may fail; a failure is shown to the waiting ranks before it leaves.

    Raises:
        PeerError: this rank failed, or some did, each in its own way; the same text on every rank.
        Exception: what failed here, unchanged, if every rank failed with the same words: then nobody waits.
    """
    try:
        yield
    except Exception as error:
        header = Header(member=call.seat.member, operation=call.operation, call=call.number, flags=Flag.FAILED)
        with call.phase("agree", exposed=True):
            rows = decode_rows(call.gather(encode_row(header)))
            problem = _find_failure(call, rows, f"{type(error).__name__}: {error}")
        if problem is None:
            raise
        raise problem from error


def agree(call: Call, header: Header, inventory: Mapping[str, str], *, uneven: str = "allow") -> Agreement:
    """Exchange headers; return what they say if they match.

    ``header`` needs no version, member, operation or call: the call knows them. ``inventory`` is what ``header.layout``
    is the fingerprint of.

    Raises:
        PeerError: a rank failed before the exchange.
        DesyncError: another wrapper, operation or call; None against int sample_size; a skipped or an extra call; with
            ``uneven="raise"`` other numbers of micro-batches.
        LayoutError: another inventory.
    """
    header = header._replace(member=call.seat.member, operation=call.operation, call=call.number)
    with call.phase("agree", exposed=True):
        headers = call.gather(encode_row(header))
        rows = decode_rows(headers)
        problem = (
            _find_failure(call, rows, "")
            or _find_other_call(call, rows)
            or _find_other_layout(call, rows, inventory)
            or _find_other_meaning(call, rows, uneven)
        )
    if problem is not None:
        raise problem
    call.seat.waited_seconds = call.seconds["agree"]
    return Agreement(headers, rows)


def agree_on_kinds(call: Call, agreement: Agreement, kinds: Sequence[int]) -> list[int]:
    """The kind of every reduced gradient: absent where nobody has one, dense where ranks hold different kinds.

    ``kinds`` are this rank's. Collective only if the headers showed that they differ; then 2 bytes a slot, whatever the
    number of ranks.
    """
    if len({row.mask for row in agreement.rows}) == 1:
        return list(kinds)
    own = torch.tensor(kinds, dtype=torch.uint8)
    # One maximum gives both ends: the largest kind, and 255 minus the smallest kind that is not absent.
    lowest = torch.where(own == ABSENT, 0, 255 - own)
    with call.phase("agree", exposed=True):
        ends = call.maximum(torch.stack([own, lowest.to(torch.uint8)]))
    largest, smallest = ends[0], 255 - ends[1]
    return [int(kind) for kind in torch.where((largest == ABSENT) | (largest == smallest), largest, DENSE)]


def describe_micro_batches(rows: Sequence[Header]) -> Finding:
    """Who brings how many micro-batches, if those who take part differ."""
    counted = {rank: row.micro_batches for rank, row in enumerate(rows) if row.takes_part}
    if len(set(counted.values())) <= 1:
        return Finding(())
    words = [str(counted[rank]) if rank in counted else "left out" for rank in range(len(rows))]
    return compare_rows([{"micro-batches since the last call": word} for word in words])


def mask_word(kinds: Sequence[int]) -> int:
    """The kinds of all gradients as one header word."""
    return fingerprint(bytes(kinds))


def _find_failure(call: Call, rows: Sequence[Header], own: str) -> AgreedError | None:
    failed = [rank for rank, row in enumerate(rows) if row.flags & Flag.FAILED]
    if not failed:
        return None
    texts = [text.decode() for text in call.gather_bytes(own.encode())]
    if len(failed) == len(rows) and len(set(texts)) == 1:
        return None
    lines = "; ".join(f"rank {rank}: {texts[rank]}" for rank in failed)
    return PeerError(
        f"{call.place.operation} call {call.number}: {name_ranks(failed)} failed before the exchange, so nothing was "
        f"exchanged and no gradient changed. {lines}",
        ranks=failed,
        call=call.number,
        phase="agree",
    )


def _find_other_call(call: Call, rows: Sequence[Header]) -> AgreedError | None:
    if len({(row.version, row.member, row.operation, row.call, row.argument) for row in rows}) == 1:
        return None
    finding = compare_rows(
        [
            {
                "header version": str(row.version),
                "wrapper": f"number {row.member} on this group",
                "operation": str(Operation(row.operation)),
                "call": f"number {row.call}",
                "src": str(row.argument),
            }
            for row in rows
        ]
    )
    return _desync(
        call,
        f"ranks met in different calls:\n{finding}\nlet every rank make the same calls in the same order",
        finding.ranks,
    )


def _find_other_layout(call: Call, rows: Sequence[Header], inventory: Mapping[str, str]) -> AgreedError | None:
    if len({row.layout for row in rows}) == 1:
        return None
    finding = compare_rows([json.loads(text) for text in call.gather_bytes(json.dumps(dict(inventory)).encode())])
    return LayoutError(
        f"{call.place.operation} call {call.number}: ranks hold different things:\n{finding}\n"
        "build the same module with the same settings on every rank",
        ranks=finding.ranks,
        call=call.number,
        phase="agree",
    )


def _find_other_meaning(call: Call, rows: Sequence[Header], uneven: str) -> AgreedError | None:
    """Ranks are in the same all_reduce() but do not mean the same by it."""
    return (
        _find_mixed_parts(call, rows)
        or _find_lone_flag(
            call, rows, Flag.REPEAT, "no backward since the last call, gradients as it left them: an extra call"
        )
        or _find_lone_flag(
            call, rows, Flag.STEPPED, "weights changed between its first backward and now: a skipped call"
        )
        or (_find_uneven(call, rows) if uneven == "raise" else None)
    )


def _find_mixed_parts(call: Call, rows: Sequence[Header]) -> AgreedError | None:
    if not {Part.PLAIN, Part.SAMPLES} <= {row.part for row in rows}:
        return None
    meant = {Part.PLAIN: "sample_size=None", Part.SAMPLES: "an int sample_size", Part.SKIP: "skip=True"}
    finding = compare_rows([{"argument": meant[Part(row.part)]} for row in rows])
    ranks = [rank for rank in finding.ranks if rows[rank].part != Part.SKIP]
    return _desync(call, f"plain and weighted calls met:\n{finding}\npass sample_size= on every rank or on none", ranks)


def _find_lone_flag(call: Call, rows: Sequence[Header], flag: Flag, reading: str) -> AgreedError | None:
    """A fact that holds on some of the ranks that take part; one that holds on all of them is how they train."""
    ranks = [rank for rank, row in enumerate(rows) if row.takes_part and row.flags & flag]
    if not ranks or len(ranks) == sum(row.takes_part for row in rows):
        return None
    lines = [f"{name_ranks(ranks)}: {reading}", str(describe_micro_batches(rows))]
    lines.append("call all_reduce() once per step on every rank")
    return _desync(call, "\n".join(line for line in lines if line), ranks)


def _find_uneven(call: Call, rows: Sequence[Header]) -> AgreedError | None:
    finding = describe_micro_batches(rows)
    return _desync(call, f"ranks bring uneven work:\n{finding}", finding.ranks) if finding else None


def _desync(call: Call, what: str, ranks: Sequence[int]) -> DesyncError:
    return DesyncError(
        f"{call.place.operation} call {call.number}: {what}", ranks=ranks, call=call.number, phase="agree"
    )
