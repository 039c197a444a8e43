"""What a call tells about itself: SyncRecord, and one RankRow per rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from legacy_ddp._header import Header, decode_rows


@dataclass(frozen=True)
class RankRow:
    """What one rank brought to a call.

    ``local_norm``: 2-norm of its local gradient, before the reduction; None unless checks were on and all on CPU.
    ``finite``: whether that gradient held neither NaN nor infinity; None likewise. ``micro_batches``: backward passes
    since its last call. ``sample_size``: its own, None for a plain call. ``took_part``: false for ``skip`` and
    ``sample_size=0``.
    ``seconds_waited``: for the other ranks' headers, in its *previous* call; the straggler waited least.
    """

    rank: int
    local_norm: float | None
    finite: bool | None
    micro_batches: int
    sample_size: int | None
    took_part: bool
    seconds_waited: float


@dataclass(frozen=True)
class SyncRecord:
    """What one :meth:`all_reduce` did on this rank. Host values, final when the call returns.

    ``call``: its number on this wrapper and group, from 1; 0 for the no-op inside ``no_sync()``. ``synchronized``:
    false for that no-op. ``skipped``: nobody took part, every ``.grad`` is None. ``sample_size``: the sum over the
    ranks, None for a plain call. ``divisor``: what the summed gradients were divided by. ``payload_bytes``: bytes of
    gradients that this rank handed to collectives. ``seconds``: own wall time per phase (plan, pack, agree, payload,
    alias).
    """

    call: int
    synchronized: bool
    skipped: bool = False
    sample_size: int | None = None
    divisor: int = 1
    skipped_ranks: tuple[int, ...] = ()
    payload_bytes: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    _headers: torch.Tensor | None = field(default=None, repr=False, compare=False)

    @cached_property
    def rows(self) -> tuple[RankRow, ...]:
        """One row per rank of the group, in rank order; decoded when first asked for."""
        if self._headers is None:
            return ()
        return tuple(_row(rank, header) for rank, header in enumerate(decode_rows(self._headers)))


def _row(rank: int, header: Header) -> RankRow:
    return RankRow(
        rank=rank,
        local_norm=header.local_norm,
        finite=header.finite,
        micro_batches=header.micro_batches,
        sample_size=header.samples,
        took_part=header.takes_part,
        seconds_waited=header.waited_us / 1e6,
    )
