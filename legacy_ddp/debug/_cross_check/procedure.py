"""A cross-check from the first run to the report. Collective."""

from collections.abc import Callable

import torch

from legacy_ddp._transport.call import Call
from legacy_ddp.debug._cross_check.explain import report_of
from legacy_ddp.debug._cross_check.locate import locate
from legacy_ddp.debug._cross_check.run import Passes
from legacy_ddp.debug._cross_check.settings import RankSettings, differing_settings
from legacy_ddp.debug._cross_check.trial import run_ring, try_batch
from legacy_ddp.debug._cross_check.verdict import CrossCheckReport, choose_batch, differing_batches


def compare_runs(
    call: Call,
    passes: Passes,
    data: torch.Tensor,
    settings: Callable[[], RankSettings],
    *,
    with_operations: bool,
) -> CrossCheckReport:
    """The report, equal on all ranks.

    ``data``: the parcel of this rank, empty without a batch. ``settings``: of this rank, asked for after a difference.

    Raises:
        PeerError: a run failed, on any rank. ValueError: no rank has a batch.
    """
    size, compared = call.groups.size, len(passes.names)
    ring = run_ring(call, passes, data, with_operations=with_operations)
    batches = differing_batches(ring.own, ring.foreign)
    if not batches:
        return CrossCheckReport(str(call), size, compared=compared)
    trial = try_batch(call, passes, ring, choose_batch(batches, size), data)
    place = locate(call, passes, trial)
    with call.phase("compare"):
        differences = differing_settings([RankSettings(*row) for row in call.gather_objects(settings())])
    return report_of(str(call), size, compared, trial.batch, trial.verdict, trial.differing, place, differences)
