"""Record of a call: SyncRecord, with a RankRow per rank, and the text of ``print(record)``."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

from legacy_ddp._errors import argument_errors
from legacy_ddp._ranks.header import Header, Headers
from legacy_ddp._statistics import NoiseScale, comparable_norm, equal_ranks, estimate_noise, find_straggler
from legacy_ddp._text import format_bytes, how_to_explain, name_ranks, plain, printable, table, wrap

_MAX_ROWS = 16  # of a text; non-finite gradients first, then the straggler, then the lowest ranks


@dataclass(frozen=True)
class RankRow:
    """Contribution of a rank to a call.

    ``rank``: its number in the group. ``local_norm``: 2-norm of the local gradient, before the reduction; None if the
    rank took no part, with checks off, and on a device unless ``nonfinite="raise"`` or ``"skip"``. ``finite``: whether
    the local gradient held neither NaN nor infinity; None without ``local_norm``. ``micro_batches``: backward passes
    since the rank's last call. ``sample_size``: of this rank, None for a plain call. ``took_part``: false for ``skip``
    and ``sample_size=0``, true in a step that all ranks skip. ``leaves``: with ``reproducible=True`` the number of
    micro-batches, else 0. ``seconds_waited``: for the headers of the other ranks, in the *previous* call; the straggler
    waited least.

    Times of the host since the rank's last call, 0 with checks off: ``forward_seconds``: in forwards of the wrapper.
    ``backward_seconds``: from the end of each forward to the last gradient before the next, including the loss.
    ``data_seconds``: in everything else (data loading, optimizer step, logging). Without a forward of the wrapper
    (:func:`all_reduce_gradients`, a compiled wrapper) ``forward_seconds`` is 0, and ``backward_seconds`` begins at the
    end of the last call.

    Example:
        >>> model(inputs).sum().backward()
        >>> record = model.all_reduce(sample_size=0 if rank == 1 else len(inputs))
        >>> [(row.rank, row.took_part, row.sample_size) for row in record.rows]
        [(0, True, 3), (1, False, 0), (2, True, 3)]
    """

    rank: int
    local_norm: float | None
    finite: bool | None
    micro_batches: int
    sample_size: int | None
    took_part: bool
    seconds_waited: float
    leaves: int = 0
    data_seconds: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0


class NoMetrics(dict[str, float]):
    """The metrics of a call that exchanged nothing: an empty dict with a KeyError that says why."""

    def __missing__(self, name: str) -> float:
        error = KeyError(
            f"metric {name!r} has no sum: got a record of all_reduce() inside no_sync(), which exchanges nothing, "
            "expected one of a call outside of the block; read the metrics after that call, or if record.synchronized"
        )
        error.add_note(how_to_explain("KeyError"))
        raise error


@dataclass(frozen=True)
class SyncRecord:
    """Record of a call of ``all_reduce()`` on this rank. Host values, final when the call returns.

    ``call``: number of the call on this wrapper and group, from 1; 0 for the no-op inside ``no_sync()``.
    ``synchronized``: false for the no-op. ``skipped``: no rank took part, or all ranks skipped the step
    (``Checks(nonfinite="skip")``); every ``.grad`` is None. ``sample_size``: the sum over the ranks, None for a plain
    call. ``divisor``: the divisor of the summed gradients, 0 if ``skipped``. ``skipped_ranks``: the ranks whose
    gradients do not count: all of them if ``skipped``. ``payload_bytes``: gradient bytes from this rank to collectives.
    ``transport``: the carrier of dense gradients on CPU, ``host`` (memory shared by the ranks of a host; gloo between
    several hosts) or ``gloo``; empty for a single rank. ``seconds``: wall time of this rank by phase (plan, pack,
    agree, payload, alias; with ``checks="detail"`` also digest, with metrics metrics, with a communication hook hook,
    inside ``join()`` join, under a recorder observe). ``rank``: number of this rank, and index of its row. ``metrics``:
    the sum of each metric over the ranks, equal on every rank, sorted by name; empty for the no-op.

    Example:
        >>> model(inputs).sum().backward()
        >>> record = model.all_reduce(sample_size=len(inputs))
        >>> record.call, record.sample_size, record.payload_bytes
        (1, 9, 8)
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
    metrics: Mapping[str, float] = field(default_factory=dict)
    _headers: Headers | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        """A line about the call and its longest phase, the metrics, and a line for each of at most 16 ranks."""
        return "\n".join([_describe(self), *_metric_lines(self), *_rank_lines(self)])

    @cached_property
    def rows(self) -> tuple[RankRow, ...]:
        """A row per rank of the group, in rank order; decoded at the first access."""
        return tuple(_row(rank, header) for rank, header in enumerate(self._headers.rows if self._headers else ()))

    def as_dict(self) -> dict[str, object]:
        """The public fields and ``rows``, by name, as numbers, texts, lists and dicts, for ``json.dumps()``.

        JSON has no NaN and no infinity: they are the texts ``nan``, ``inf`` and ``-inf``, which ``float()`` reads.

        Example:
            >>> model(inputs).sum().backward()
            >>> facts = model.all_reduce(metrics={"loss": float("nan")}).as_dict()
            >>> facts["call"], facts["metrics"], len(facts["rows"])
            (1, {'loss': 'nan'}, 3)
        """
        public = [part.name for part in fields(self) if not part.name.startswith("_")]
        rows = [_as_json(asdict(row)) for row in self.rows]
        return {**{name: _as_json(getattr(self, name)) for name in public}, "rows": rows}

    @property
    def identical_ranks(self) -> tuple[tuple[int, ...], ...]:
        """Groups of two or more ranks with local gradients of equal norm, to the last bit.

        Zero and non-finite norms do not count. Gradients of different data almost never have equal norms, except where
        they do not depend on the data.
        """
        return equal_ranks([comparable_norm(row.local_norm, row.finite) for row in self.rows])

    @property
    def straggler(self) -> tuple[int, float] | None:
        """The last rank of the *previous* call, and how many seconds longer the median of the other ranks waited.

        In every call some rank is last; a rank that is last in many calls, by many seconds, is slow. None in a first
        call and for a single rank.
        """
        return find_straggler([row.seconds_waited for row in self.rows])

    @argument_errors
    def noise_scale(self, reduced_norm: float | torch.Tensor) -> NoiseScale:
        """Estimate of the gradient noise scale: larger batches are worth while up to this size.

        ``reduced_norm``: 2-norm of the reduced gradient of the same parameters, as
        :func:`torch.nn.utils.clip_grad_norm_` returns it directly after the call. With a GradScaler the norm *before*
        ``unscale_``: the local norms are scaled, too.

        After McCandlish, Kaplan, Amodei et al. 2018, "An Empirical Model of Large-Batch Training", arXiv:1812.06162,
        appendix A.1, where each rank that took part has a small batch. Rank r's gradient is a sum over n_r items
        (``sample_size``; 1 in a plain call), ``g_r`` the sum / n_r, g the reduced gradient, N = Σ n_r. With G the true
        gradient and Σ the covariance of one item's gradient, ``E|g_r|² = |G|² + tr(Σ) / n_r`` and
        ``E|g|² = |G|² + tr(Σ) / N``. With h the mean over ranks of 1 / n_r, and A the mean of ``|g_r|²``::

            tr(Σ) ≈ (A - |g|²) / (h - 1 / N),    |G|² ≈ |g|² - tr(Σ) / N

        In the paper all ranks have equal numbers of items: h = 1 / B_small. As there, average ``squared_norm`` and
        ``noise`` over many calls before the division. Both are NaN or infinite if a norm is.

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
                'checks="info" on CPU, and on CUDA with Checks(nonfinite="raise") or LEGACY_DDP_CHECKS=nonfinite=raise'
            )
        # Ranks that have finished in a join() may count as zeros: then the mean over the participants is larger.
        scale = self.divisor / len(rows) if self.sample_size is None else 1.0
        return estimate_noise(norms, [row.sample_size or 1 for row in rows], scale * float(reduced_norm))


def _as_json(value: Any) -> object:
    if isinstance(value, Mapping):
        return {key: _as_json(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else plain(value)


def _row(rank: int, header: Header) -> RankRow:
    return RankRow(
        rank=rank,
        local_norm=header.local_norm,
        finite=header.finite,
        micro_batches=header.micro_batches,
        sample_size=header.samples,
        took_part=header.takes_part,
        seconds_waited=round(header.waited_seconds, 6),
        leaves=header.leaves,
        data_seconds=round(header.data_seconds, 6),
        forward_seconds=round(header.forward_seconds, 6),
        backward_seconds=round(header.backward_seconds, 6),
    )


def _describe(record: SyncRecord) -> str:
    if not record.synchronized:
        return "no call: inside no_sync()"
    items = "sample" if record.sample_size is not None else "rank"
    facts = [f"mean over {record.divisor:,} {items}{'s' if record.divisor != 1 else ''}"]
    if record.skipped:
        facts = [f"{_reason_of_skip(record)}, every .grad is None"]
    if record.transport:
        facts.append(f"{format_bytes(record.payload_bytes)} by {record.transport}")
    if record.seconds:
        phase, longest = max(record.seconds.items(), key=lambda item: item[1])
        facts.append(f"{_duration(sum(record.seconds.values()))} ({phase} {_duration(longest)})")
    return f"call {record.call}: {', '.join(facts)}"


def _reason_of_skip(record: SyncRecord) -> str:
    if not any(row.took_part for row in record.rows):
        return "no rank took part"
    ranks = [row.rank for row in record.rows if row.finite is False]
    return f"all ranks skipped this step, because of NaN or infinity on {name_ranks(ranks)}"


def _metric_lines(record: SyncRecord) -> list[str]:
    sums = ", ".join(f"{printable(name)} {value:.6g}" for name, value in record.metrics.items())
    return wrap(f"metrics, summed over the ranks: {sums}", "  ") if sums else []


def _rank_lines(record: SyncRecord) -> list[str]:
    if not record.rows:
        return []
    rows = [record.rows[rank] for rank in _shown_ranks(record)]
    counted = record.sample_size is not None
    heads = ("rank", "local norm", "micro-batches", *(["samples"] if counted else []), "waited before", "")
    lines = table([heads, *(tuple(_cells(row, counted=counted)) for row in rows)])
    more = len(record.rows) - len(rows)
    return [*lines, f"  ... {more:,} more ranks"] if more else lines


def _shown_ranks(record: SyncRecord) -> Sequence[int]:
    ranks = range(len(record.rows))
    if len(ranks) <= _MAX_ROWS:
        return ranks
    notable = [row.rank for row in record.rows if row.finite is False][: _MAX_ROWS // 2]
    notable += [record.straggler[0]] if record.straggler else []
    return sorted([*dict.fromkeys([*notable, *ranks])][:_MAX_ROWS])


def _cells(row: RankRow, *, counted: bool) -> Iterator[str]:
    yield str(row.rank)
    yield "" if row.local_norm is None else f"{row.local_norm:.6g}"
    yield f"{row.leaves or row.micro_batches:,}"
    if counted:
        yield "" if row.sample_size is None else f"{row.sample_size:,}"
    yield _duration(row.seconds_waited)
    yield "" if row.took_part else "took no part"


def _duration(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
