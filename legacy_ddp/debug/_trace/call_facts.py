"""The facts of a trace about one call, from the record of the call."""

import math

from legacy_ddp._record import SyncRecord
from legacy_ddp.debug._trace.records import CallFacts
from legacy_ddp.debug._trace.snapshot import Inputs


def facts_of(record: SyncRecord, generators: str, inputs: Inputs) -> CallFacts:
    """The facts on this rank. ``generators``: 16 hex digits; ``inputs``: of the forward passes since the last call."""
    row = record.rows[record.rank]
    return CallFacts(
        call=record.call,
        micro_batches=row.micro_batches,
        sample_size=row.sample_size,
        took_part=row.took_part,
        divisor=record.divisor,
        local_norm=_finite(row.local_norm) if row.finite else None,
        finite=row.finite,
        payload_bytes=record.payload_bytes,
        seconds={phase: round(seconds, 6) for phase, seconds in record.seconds.items()},
        seconds_waited=round(record.seconds["agree"], 6),
        generators=generators,
        forwards=inputs.forwards,
        inputs=tuple(inputs.found),
        inputs_complete=inputs.complete and inputs.forwards >= row.micro_batches,
        metrics=record.metrics,
    )


def _finite(norm: float | None) -> float | None:
    """The norm, or None for infinity, which JSON lacks: finite gradients may have a norm too large for a float64."""
    return norm if norm is not None and math.isfinite(norm) else None
