"""Record of a call: SyncRecord, with a RankRow per rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from legacy_ddp._agreement.header import Header, decode_rows
from legacy_ddp._statistics import NoiseScale, comparable_norm, equal_ranks, estimate_noise, find_straggler


@dataclass(frozen=True)
class RankRow:
    """Contribution of a rank to a call.

    ``local_norm``: 2-norm of the local gradient, before the reduction; None if the rank took no part, with checks off,
    and on CUDA unless ``nonfinite="raise"``. ``finite``: whether the local gradient held neither NaN
    nor infinity; None without ``local_norm``. ``micro_batches``: backward passes since the rank's last call.
    ``sample_size``: of this rank, None for a plain call. ``took_part``: false for ``skip`` and ``sample_size=0``.
    ``leaves``: with ``reproducible=True`` the number of micro-batches, else 0. ``seconds_waited``: for the headers of
    the other ranks, in the *previous* call; the straggler waited least.
    """

    rank: int
    local_norm: float | None
    finite: bool | None
    micro_batches: int
    sample_size: int | None
    took_part: bool
    seconds_waited: float
    leaves: int = 0


@dataclass(frozen=True)
class SyncRecord:
    """Record of an :meth:`all_reduce` on this rank. Host values, final when the call returns.

    ``call``: number of the call on this wrapper and group, from 1; 0 for the no-op inside ``no_sync()``.
    ``synchronized``: false for the no-op. ``skipped``: no rank took part, every ``.grad`` is None. ``sample_size``: the
    sum over the ranks, None for a plain call. ``divisor``: the divisor of the summed gradients. ``payload_bytes``:
    gradient bytes from this rank to collectives. ``transport``: the carrier of dense gradients on CPU, ``host`` (memory
    shared by the ranks of a host; gloo between several hosts) or ``gloo``; empty for a single rank. ``seconds``: wall
    time of this rank per phase (plan, pack, agree, payload, alias; with ``checks="detail"`` also digest, with a
    communication hook hook, inside :meth:`join` join, under a recorder observe). ``rank``: number of this rank, and
    index of its row.
    """

    call: int
    synchronized: bool
    skipped: bool = False
    sample_size: int | None = None
    divisor: int = 1
    skipped_ranks: tuple[int, ...] = ()
    payload_bytes: int = 0
    transport: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    rank: int = 0
    _headers: torch.Tensor | None = field(default=None, repr=False, compare=False)

    @cached_property
    def rows(self) -> tuple[RankRow, ...]:
        """A row per rank of the group, in rank order; decoded at the first access."""
        if self._headers is None:
            return ()
        return tuple(_row(rank, header) for rank, header in enumerate(decode_rows(self._headers)))

    @property
    def identical_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Groups of two or more ranks with local gradients of equal norm, to the last bit.

        Gradients of different data almost never have equal norms. Zero and non-finite norms do not count.
        """
        return equal_ranks([comparable_norm(row.local_norm, row.finite) for row in self.rows])

    @property
    def straggler(self) -> tuple[int, float] | None:
        """The last rank of the *previous* call, and how many seconds longer the median of the other ranks waited.

        In every call some rank is last. A rank named again and again, with many seconds, is slow. None
        in a first call and for a single rank.
        """
        return find_straggler([row.seconds_waited for row in self.rows])

    def noise_scale(self, reduced_norm: float | torch.Tensor) -> NoiseScale:
        """Estimate of the gradient noise scale, up to which larger batches are worth while.

        ``reduced_norm``: 2-norm of the reduced gradient of the same parameters, as
        :func:`torch.nn.utils.clip_grad_norm_` returns it right after the call. With a GradScaler the norm *before*
        ``unscale_``: the local norms are scaled, too.

        After McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training", arXiv:1812.06162,
        appendix A.1, with a small batch per rank that took part. Rank r's gradient is a sum over n_r items
        (``sample_size``; in a plain call its contribution is one item), g_r the sum / n_r, g the reduced gradient,
        N = Σ n_r. With G the true gradient and Σ the covariance of one item's gradient, E|g_r|² = |G|² + tr(Σ) / n_r
        and E|g|² = |G|² + tr(Σ) / N. With h the mean over ranks of 1 / n_r, and A the mean of |g_r|²,

            tr(Σ) ≈ (A - |g|²) / (h - 1 / N),    |G|² ≈ |g|² - tr(Σ) / N

        The paper has the same number of items on every rank, where h = 1 / B_small. One call is not enough: average
        ``squared_norm`` and ``noise`` over many calls before the division, as the paper does. Both are NaN or infinite
        if a norm is.

        Raises:
            ValueError: fewer than two ranks took part, or a norm is missing.
        """
        rows = [row for row in self.rows if row.took_part]
        norms = [row.local_norm for row in rows if row.local_norm is not None]
        if len(rows) < 2:
            raise ValueError(f"noise_scale() compares ranks: got {len(rows)} that took part, expected at least 2")
        if len(norms) < len(rows):
            raise ValueError(
                f"norms are missing: got those of {len(norms)} of {len(rows)} ranks, expected all; they are taken with "
                'checks="info" on CPU, and on CUDA with Checks(nonfinite="raise")'
            )
        # In a join() finished ranks may count as zeros: then the mean over the participants is larger.
        scale = self.divisor / len(rows) if self.sample_size is None else 1.0
        return estimate_noise(norms, [row.sample_size or 1 for row in rows], scale * float(reduced_norm))


def _row(rank: int, header: Header) -> RankRow:
    return RankRow(
        rank=rank,
        local_norm=header.local_norm,
        finite=header.finite,
        micro_batches=header.micro_batches,
        sample_size=header.samples,
        took_part=header.takes_part,
        seconds_waited=header.waited_us / 1e6,
        leaves=header.leaves,
    )
