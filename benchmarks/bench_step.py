"""Cost of a whole training step: ours, torch DDP in three forms, a collective per parameter, and limits.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_step.py [--quick] [--json FILE]

A step is zero_grad, `update-freq` times forward and backward, synchronisation, SGD. A table for each model, update-freq
and zero_grad(set_to_none=); all variants of a table are run once per round, in rotating order, and ratios are taken
within a round. No variant broadcasts buffers (BatchNorm); torch DDP's default would broadcast them in every forward.

torch DDP                       by default: the reference; no_sync() but for the last micro-batch
torch DDP, bucket views         gradient_as_bucket_view=True: gradients are views of the buckets, without copying back
torch DDP, static graph         static_graph=True. Its first backward fails inside no_sync(), so all variants
                                begin with a step of one micro-batch
ours, off / ours, info          LegacyDistributedDataParallel, checks="off" and "info": one all_reduce() after the last
                                backward, without overlap
one collective per parameter    no wrapper: after the last backward all_reduce and a division for each gradient
local compute + bare all_reduce no wrapper: after the last backward one all_reduce of an existing tensor of the
                                gradients' bytes. Gradients are neither packed nor averaged: a limit for every call
                                after backward, not a way to train
local compute alone             no wrapper, no communication
torch DDP again                 the reference once more: its distance from 1 is noise

Before the timing, every synchronising variant takes three steps from equal weights, with different data per rank, and
has to end in the weights of torch DDP (to 1e-4); "local compute alone" has to end in different weights.

10,000 tiny tensors run without one collective per parameter, which takes 30 times the step of torch DDP;
bench_all_reduce.py measures it.

The embedding has 256 MiB of weights and 256 MiB of gradients per variant, and a bucket in some variants. To fit 4 ranks
into 23 GB (4.4 GiB each), it runs without static graph, without local compute alone, and without the bare all_reduce,
which equals one collective per parameter without division for a single parameter. The sparse embedding runs without
bucket views and without the bare all_reduce: sparse gradients are in no bucket, and their size changes by rank and
step.

"phases" are the medians of record.seconds over the timed steps of ours. Seconds are from rank 0. The results file has
the processor time of its steps, too (cpu_ms, cpu_ratio): of a small model it tells more than the time. Ranks
communicate over the loopback, and every core computes: torch DDP overlaps less than with spare cores. Python collects
garbage as in training, mostly in steps with many allocations: with 10,000 tensors possibly in every second step, so
read p90, too.

Aims on 2 ranks, ours with checks off: transformer by torch DDP with bucket views, its faster form, <= 0.82, from
update-freq 4 on <= 0.95; by torch DDP's default, small ResNet <= 0.90, 10,000 tiny tensors <= 1.00, embedding <= 0.85.
Transformer, info by off <= 1.05, from update-freq 4 on <= 1.03. --quick: transformer, update-freq 1 and 4,
set_to_none=True, 8 rounds.
"""

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from _interrupt import quiet_interrupt
from _measure import (
    Variant,
    measure,
    median_ratio,
    parse,
    print_aims,
    print_phases,
    print_table,
    process_group,
    summarize,
    verdicts,
    write_results,
)
from _parity import check_training
from _ways import INFO, OFF, REFERENCE, VIEWS, Way, begin, own_batches, ways_for
from _workloads import LAYERS, WORKLOADS, Workload, workload_named

RATIOS = {
    "ours, off / torch DDP": (OFF, REFERENCE),
    "ours, off / torch DDP, bucket views": (OFF, VIEWS),
    "ours, info / ours, off": (INFO, OFF),
}
OFF_TO_DDP, OFF_TO_VIEWS, INFO_TO_OFF = RATIOS
AIMED_RANKS = 2
TRANSFORMER_AIMS = {
    1: {OFF_TO_VIEWS: 0.82, INFO_TO_OFF: 1.05},
    4: {OFF_TO_VIEWS: 0.95, INFO_TO_OFF: 1.03},
}  # from there
OTHER_AIMS = {"resnet": 0.90, "tiny": 1.00, "embedding": 0.85}
QUICK = (
    "--models",
    "transformer",
    "--update-freq",
    "1",
    "4",
    "--set-to-none",
    "yes",
    "--repeats",
    "2",
    "--rounds",
    "4",
)


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print on rank 0, write JSON if asked."""
    arguments = parse_arguments(given)
    with process_group():
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Collective: one table after the other."""
    if dist.get_world_size() == 1:
        sys.exit("nothing to synchronise: got 1 rank, expected 2 or more; raise --nproc-per-node")
    results = {}
    for model, update_freq, set_to_none in itertools.product(
        arguments.models, arguments.update_freq, arguments.set_to_none
    ):
        title = f"step of {model}, update-freq {update_freq}, set_to_none={set_to_none}, {dist.get_world_size()} ranks"
        results[title] = _answer(model, update_freq, set_to_none == "yes", arguments)
        if dist.get_rank() == 0:
            print_table(title, results[title]["variants"])
            print_phases(results[title]["variants"])
            print_aims(results[title]["ratios"], results[title]["aims"])
    write_results(arguments, results)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS), help="default: all")
    parser.add_argument("--update-freq", type=int, nargs="+", default=[1, 4, 16], help="default: %(default)s")
    parser.add_argument("--set-to-none", nargs="+", choices=("yes", "no"), default=["yes", "no"], help="default: both")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the transformer (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"short for {' '.join(QUICK)}; what else is given counts")
    given = sys.argv[1:] if given is None else given
    arguments = parse(parser, (*QUICK, *given) if "--quick" in given else given)
    for option, least in {"layers": arguments.layers, "update-freq": min(arguments.update_freq)}.items():
        if least < 1:
            parser.error(f"--{option} is a count: got {least}, expected 1 or more")
    return arguments


def _answer(model: str, update_freq: int, set_to_none: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Collective: one table, with its aims."""
    ways, workload = ways_for(model), workload_named(model, layers=arguments.layers)
    check_training(ways, workload, update_freq, set_to_none=set_to_none)
    variants = measure(partial(_variants, ways, workload, update_freq, set_to_none), arguments)
    compared = {what: pair for what, pair in RATIOS.items() if ways.keys() >= {*pair}}
    ratios = {what: median_ratio(variants, own, other) for what, (own, other) in compared.items()}
    aims = aims_for(model, update_freq, dist.get_world_size())
    return {"aims": aims, "ratios": ratios, "verdicts": verdicts(ratios, aims), "variants": summarize(variants)}


def _variants(ways: Mapping[str, Way], workload: Workload, update_freq: int, set_to_none: bool) -> list[Variant]:
    batches = own_batches(workload, update_freq)
    trainings = {name: begin(way, workload, set_to_none=set_to_none) for name, way in ways.items()}
    return [Variant(name, partial(training.step, batches)) for name, training in trainings.items()]


def aims_for(model: str, update_freq: int, size: int) -> Mapping[str, float]:
    """Upper limits of the ratios of a table."""
    if size != AIMED_RANKS:
        return {}
    if model == "transformer":
        return TRANSFORMER_AIMS[max(least for least in TRANSFORMER_AIMS if least <= update_freq)]
    return {OFF_TO_DDP: OTHER_AIMS[model]} if model in OTHER_AIMS else {}


if __name__ == "__main__":
    with quiet_interrupt():
        main()
