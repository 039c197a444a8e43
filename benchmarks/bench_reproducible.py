"""Cost of reproducible=True (sums in one order for all splits) against the plain call.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_reproducible.py [--json FILE]

Every variant has its own copy of one model; all are run once per round in rotating order, the ranks aligned by a
barrier first, and everything is built several times. A ratio is the median of the rounds' ratios to the first variant,
checks are off, gradients are those of a real backward. Two tables:

call    all_reduce(sample_size=) alone, of the 8.8 million parameters of a transformer

        bare all_reduce        one all_reduce of a tensor of the gradients' bytes: a sum, without packing or division
        plain                  the call without reproducible=
        plain again            the control: its distance from the line before is noise
        reproducible, K = 1    the same gradients, added in tree order
        reproducible, K = 4    the last of four micro-batches; the three sums of earlier micro-batches are added, too

step    zero_grad(), K micro-batches forward and backward, the call, SGD; of the transformer and of the main job's
        model. With reproducible=True every micro-batch is a no_sync() block, which adds its gradients at its end

Aims: a call by the bare all_reduce <= 0.60, after four micro-batches <= 1.2; a step of the main job with 4
micro-batches <= 1.3 of the plain one.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _checkout import ROOT
from _interrupt import quiet_interrupt
from _measure import (
    Variant,
    measure,
    parse,
    print_aims,
    print_phases,
    print_table,
    process_group,
    summarize,
    verdicts,
    write_results,
)
from _ways import flat_like
from _workloads import BATCH, SEQUENCE, Workload, workload_named
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, SyncRecord

sys.path.append(str(ROOT / "examples"))
from _text import BYTE_VALUES
from train_lm import CONTEXT, ByteModel

BARE, PLAIN, CONTROL = "bare all_reduce", "plain", "plain again"
CALL_AIMS = {"reproducible, K = 1": 0.60, "reproducible, K = 4": 1.2}
STEP_AIM = 1.3
SEED = 1
SAMPLES = BATCH * SEQUENCE  # any number: it only divides


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print a table per question on rank 0, write JSON if asked."""
    arguments = parse_arguments(given)
    with process_group():
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Collective: the call, then whole steps."""
    size = dist.get_world_size()
    if size == 1:
        sys.exit("nothing to reduce: got 1 rank, expected 2 or more; raise --nproc-per-node")
    workloads = {"transformer": workload_named("transformer"), "main job": main_job()}
    tables: dict[str, tuple[Callable[[], list[Variant]], dict[str, float]]] = {
        f"call, transformer, {size} ranks": (
            partial(_calls, workloads["transformer"]),
            CALL_AIMS,
        )
    }
    for name, workload in workloads.items():
        for each in arguments.update_freq:
            aims = {"reproducible": STEP_AIM} if (name, each) == ("main job", 4) else {}
            tables[f"step of {name}, update-freq {each}, {size} ranks"] = partial(_steps, workload, each), aims
    results: dict[str, Any] = {}
    for title, (build, aims) in tables.items():
        summary = summarize(measure(build, arguments))
        ratios = {name: summary[name]["median_ratio"] for name in aims}
        results[title] = {"aims": aims, "verdicts": verdicts(ratios, aims), "variants": summary}
        if dist.get_rank() == 0:
            print_table(title, summary)
            print_phases(summary)
            print_aims(ratios, aims)
    write_results(arguments, results)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--update-freq", type=int, nargs="+", choices=(1, 2, 4, 8, 16), default=[1, 4], help="default: %(default)s"
    )
    return parse(parser, given)


def main_job() -> Workload:
    """The model of examples/train_lm.py, on random bytes."""

    def loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
        logits = model(windows[:, :-1]).flatten(0, 1)
        return nn.functional.cross_entropy(logits, windows[:, 1:].flatten(), reduction="sum")

    return Workload(ByteModel, lambda count: list(torch.randint(BYTE_VALUES, (count, 16, CONTEXT + 1))), loss)


def _calls(workload: Workload) -> list[Variant]:
    """Collective: the variants of a call, on new models with equal weights."""
    flat = flat_like(workload.build())
    variants = [Variant(BARE, partial(dist.all_reduce, flat), flat.zero_)]
    for name, each in ((PLAIN, 1), (CONTROL, 1), ("reproducible, K = 1", 1), ("reproducible, K = 4", 4)):
        model = _model(workload, is_reproducible=name not in (PLAIN, CONTROL))
        batches = _batches(workload, each)
        prepare = partial(_accumulate, model, workload, batches)
        variants.append(Variant(name, partial(model.all_reduce, SAMPLES), prepare))
    return variants


def _steps(workload: Workload, each: int) -> list[Variant]:
    """Collective: the variants of a step, on new models with equal weights."""
    variants = []
    for name in (PLAIN, CONTROL, "reproducible"):
        model = _model(workload, is_reproducible=name == "reproducible")
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        variants.append(Variant(name, partial(_step, model, optimizer, workload, _batches(workload, each))))
    return variants


def _model(workload: Workload, *, is_reproducible: bool) -> LegacyDistributedDataParallel:
    torch.manual_seed(SEED)
    return LegacyDistributedDataParallel(workload.build(), checks="off", reproducible=is_reproducible)


def _batches(workload: Workload, each: int) -> Sequence[torch.Tensor]:
    torch.manual_seed(SEED + 1 + dist.get_rank())
    return workload.batches(each)


def _step(
    model: LegacyDistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    workload: Workload,
    batches: Sequence[torch.Tensor],
) -> SyncRecord:
    _accumulate(model, workload, batches)
    record = model.all_reduce(SAMPLES)
    optimizer.step()
    return record


def _accumulate(model: LegacyDistributedDataParallel, workload: Workload, batches: Sequence[torch.Tensor]) -> None:
    """Every micro-batch but the last in a separate no_sync() block, which matters for reproducible=True only."""
    model.zero_grad()
    for batch in batches:
        with nullcontext() if batch is batches[-1] else model.no_sync():
            workload.loss(model, batch).backward()


if __name__ == "__main__":
    with quiet_interrupt():
        main()
