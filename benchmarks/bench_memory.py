"""Memory for gradients, against torch DDP, in multiples of the parameters' bytes.

    python benchmarks/bench_memory.py [--json FILE]

The script starts its own ranks, two new ranks for each variant and way of counting, because allocators keep freed
memory. Each rank builds the model, wraps it, and trains: zero_grad, forward, backward, synchronisation, SGD without
momentum (without state). Parameters and batches are subtracted from all figures.

gradients    memory for gradients and for the wrapper, at the peak of a later step: the greater of (in forward and
             backward) the peak, minus the peak of the same model with each gradient dropped at once; and (from there to
             the end of the step, without activations) the peak
first step   the same for the wrapper's constructor and the first step, with the largest peak if buffers are made
             beside existing gradients: this memory must be available
kept         memory still held after the step
peak         peak of a step, in MiB, activations included
allocs       number of allocations from torch's allocator per step

Gradients are counted in two independent ways. First by torch's allocator, through the profiler: exact, without
allocations of a transport, and the least of `repeats` runs, as the profiler misses tensors freed by a thread of a
transport. Second by the kernel, as resident memory (RSS) of a separate run without profiler: complete, with noise from
the rest of the process; "rss" is gradients counted in this way, with malloc set to return freed memory. On a device
only its allocator counts.

Local compute alone does not synchronise: its figure is the gradients themselves. No variant broadcasts buffers. torch
DDP runs by default and with gradient_as_bucket_view=True ("views"); ours runs with checks="info", by default and with
gradient_as_bucket_view=False ("no views"), and with transport="gloo" ("gloo"). By default ranks share the memory of
gradients: both ways of counting divide a shared page among the processes that use it (proportional set size, read at
the end of backward and of the step), while top and ps count the page for each process. zero_grad(set_to_none=True)
drops gradients before each step, so the buffers of a wrapper exist beside the new gradients, unless the wrapper moves
each gradient into its buffer; =False keeps and clears the gradients. The aim is for =False: ours <= 1.05. If the two
counts differ by more than 0.15, the verdict is open; the memory of gloo for two collectives, about 4 MiB, is 0.11 of
the transformer's gradients.
"""

import argparse
import gc
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _checkout import environment
from _interrupt import quiet_interrupt
from _measure import machine, results_path, save
from _memory import (
    STATUS,
    AllocatorMeter,
    DeviceMeter,
    Meter,
    ResidentMeter,
    Use,
    first_gradients,
    gradients,
    greatest,
    least,
    use_of,
)
from _workloads import WORKLOADS, WRAPPERS, Workload, mean_square
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp._check_settings import CHECKS_VARIABLE

AIM, AGREE_WITHIN = 1.05, 0.15
AIMED_AT = "ours, set_to_none=False"
MODELS = ("transformer", "embedding")  # what is measured if nothing else is asked for
METERS: Mapping[str, type[Meter]] = {"allocator": AllocatorMeter, "rss": ResidentMeter, "device": DeviceMeter}
SETTINGS_OF_RANKS = {
    # Or freed memory stays resident, up to tens of MiB. Read by glibc when a process starts.
    "MALLOC_MMAP_THRESHOLD_": str(2**16),
    "MALLOC_TRIM_THRESHOLD_": str(2**16),
    "KINETO_LOG_LEVEL": "99",  # or the profiler writes a line to stderr whenever it starts
}


def drop_gradients(module: nn.Module) -> nn.Module:
    """``module``, with hooks that drop each gradient at once."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(drop)
    return module


def leave_alone(module: nn.Module) -> nn.Module:
    """``module``."""
    return module


NOT_KEPT = "no gradient kept"
WRAPS: Mapping[str, Callable[[nn.Module], nn.Module]] = MappingProxyType(
    {
        NOT_KEPT: drop_gradients,
        "local compute alone": leave_alone,
        "torch DDP": WRAPPERS["torch DDP"],
        "torch DDP, views": WRAPPERS["torch DDP, bucket views"],
        "ours": LegacyDistributedDataParallel,
        "ours, gloo": partial(LegacyDistributedDataParallel, transport="gloo"),
        "ours, no views": partial(LegacyDistributedDataParallel, gradient_as_bucket_view=False),
    }
)


@dataclass(frozen=True)
class Job:
    """The work of a rank, by name, as a job is sent to another process."""

    model: str
    wrap: str
    set_to_none: bool
    way: str
    steps: int
    device: str


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print a table per model, write JSON if asked."""
    arguments = parse_arguments(given)
    if "RANK" in os.environ:
        sys.exit("start without torchrun: python benchmarks/bench_memory.py starts its own ranks")
    os.environ.update({**environment(), **SETTINGS_OF_RANKS})
    mp.get_context("forkserver").set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo", "legacy_ddp"])
    results = {}
    for model in arguments.models:
        results[model] = _answer(model, arguments)
        _print(model, results[model])
    group = {"world_size": arguments.ranks, "backend": "gloo", "threads_per_rank": 1}
    save(arguments, {**machine(), **group}, results)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", choices=list(WORKLOADS), default=list(MODELS), help="default: %(default)s"
    )
    kept = [name for name in WRAPS if name != NOT_KEPT]
    parser.add_argument("--variants", nargs="+", choices=kept, default=kept, help="default: all")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="of which the last is counted (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="of which the least counts (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument("--json", type=results_path, help="write the table and the environment here")
    arguments = parser.parse_args(given)
    if arguments.ranks < 2:
        parser.error(f"too few --ranks: got {arguments.ranks}, expected 2 or more")
    if arguments.repeats < 1:
        parser.error(f"too few --repeats: got {arguments.repeats}, expected 1 or more")
    if arguments.steps < 3:
        parser.error(f"too few --steps: got {arguments.steps}, expected 3 or more; buffers are made in the first ones")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device: got --device cuda, and torch sees none")
    if os.environ.get(CHECKS_VARIABLE):
        parser.error(f"{CHECKS_VARIABLE} is set, expected not to be: it overrides the level that is measured")
    return arguments


def _answer(model: str, arguments: argparse.Namespace) -> dict[str, Any]:
    ways = ["device"] if arguments.device == "cuda" else ["allocator", *(["rss"] if STATUS.exists() else [])]
    measured = partial(_measure_ranks, arguments, model)
    without = {way: measured(NOT_KEPT, True, way) for way in ways}
    with torch.device("meta"):
        parameter_bytes = sum(parameter.nbytes for parameter in WORKLOADS[model].build().parameters())
    variants = {}
    for wrap in arguments.variants:
        for set_to_none in (False, True):
            uses = {way: measured(wrap, set_to_none, way) for way in ways}
            variants[f"{wrap}, set_to_none={set_to_none}"] = row(uses, without, parameter_bytes)
    return {
        "aim": AIM,
        "verdict": verdict(variants[AIMED_AT]) if AIMED_AT in variants else "not measured",
        "parameters_mib": parameter_bytes / 2**20,
        "peak_when_no_gradient_is_kept_mib": without[ways[0]].backward_peak / 2**20,
        "variants": variants,
    }


def _measure_ranks(arguments: argparse.Namespace, model: str, wrap: str, set_to_none: bool, way: str) -> Use:
    job = Job(model, wrap, set_to_none, way, arguments.steps, arguments.device)
    return least([_run_ranks(arguments.ranks, job) for _ in range(arguments.repeats if way == "allocator" else 1)])


def _run_ranks(ranks: int, job: Job) -> Use:
    """The greatest figures of any rank, in newly started ranks."""
    with TemporaryDirectory() as folder:
        mp.start_processes(
            _run_rank,
            args=(ranks, folder, job),
            nprocs=ranks,
            daemon=True,  # so that they end with this process, whatever ends it
            start_method="forkserver",
        )
        uses = [json.loads(path.read_text()) for path in Path(folder).glob("use-*.json")]
    return greatest([Use(**use) for use in uses])


def _run_rank(rank: int, ranks: int, folder: str, job: Job) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and that ends its ranks
    torch.set_num_threads(1)
    if job.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        use = measure_rank(WRAPS[job.wrap], WORKLOADS[job.model], METERS[job.way](), job)
        Path(folder, f"use-{rank}.json").write_text(json.dumps(asdict(use)))
    finally:
        dist.destroy_process_group()


def measure_rank(wrap: Callable[[nn.Module], nn.Module], workload: Workload, meter: Meter, job: Job) -> Use:
    """Collective: the memory of this rank. Of ``job`` only the steps, the device and the kind of zero_grad are used."""
    # Imports, threads, connections and the working space of kernels are made here, not below; but nothing that a
    # wrapper keeps for gradients of the model's size.
    _train(wrap(nn.Linear(2, 2).to(job.device)), mean_square, torch.ones(2, 2, device=job.device), Meter(), job)
    batch = workload.batches(1)[0].to(job.device)
    _train(workload.build().to(job.device), workload.loss, batch, Meter(), job)
    gc.collect()
    with meter:
        module = workload.build().to(job.device)
        meter.mark("built")
        _train(wrap(module), workload.loss, batch, meter, job)
    return use_of(meter.spans, job.steps)


def _train(
    model: nn.Module,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    batch: torch.Tensor,
    meter: Meter,
    job: Job,
) -> None:
    meter.mark("wrapped")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for number in range(1, job.steps + 1):
        optimizer.zero_grad(set_to_none=job.set_to_none)
        loss(model, batch).backward()
        meter.mark(f"backward {number}")
        if isinstance(model, LegacyDistributedDataParallel):
            model.all_reduce()
        optimizer.step()
        meter.mark(f"later {number}")
    dist.barrier()  # a page that another rank has given back would count in full here


def row(uses: Mapping[str, Use], without: Mapping[str, Use], parameter_bytes: int) -> dict[str, float]:
    """The figures of a variant: all of the first (exact) way of counting, and gradients of all ways."""
    way, *others = uses
    exact = uses[way]
    figures: dict[str, float] = {
        "gradients_ratio": gradients(exact, without[way]) / parameter_bytes,
        "first_step_ratio": first_gradients(exact, without[way]) / parameter_bytes,
        "kept_ratio": exact.kept / parameter_bytes,
        "peak_mib": max(exact.backward_peak, exact.later_peak) / 2**20,
        "allocations_per_step": exact.allocations,
    }
    for other in others:
        figures[f"{other}_gradients_ratio"] = gradients(uses[other], without[other]) / parameter_bytes
    return figures


def verdict(figures: Mapping[str, float]) -> str:
    """The verdict on the aim; open if the ways of counting disagree."""
    exact = figures["gradients_ratio"]
    if abs(figures.get("rss_gradients_ratio", exact) - exact) > AGREE_WITHIN:
        return "not decided"
    return "met" if exact <= AIM else "missed"


def _print(model: str, result: Mapping[str, Any]) -> None:
    title = f"{model}, {result['parameters_mib']:.1f} MiB of parameters = 1"
    print(f"\n{title}\n{'':38}{'grads':>7}{'rss':>6}{'first':>6}{'kept':>6}{'peak':>9}{'allocs':>8}")
    for name, figures in result["variants"].items():
        rss = figures.get("rss_gradients_ratio", math.nan)
        ratios = f"{figures['gradients_ratio']:7.2f}{rss:6.2f}{figures['first_step_ratio']:6.2f}"
        rest = f"{figures['kept_ratio']:6.2f}{figures['peak_mib']:6.0f}MiB{figures['allocations_per_step']:8}"
        print(f"{name:38}{ratios}{rest}")
    print(f"aim, {AIMED_AT}: gradients <= {result['aim']:.2f}: {result['verdict']}")
    print(f"peak when no gradient is kept: {result['peak_when_no_gradient_is_kept_mib']:.1f} MiB", flush=True)


if __name__ == "__main__":
    with quiet_interrupt():
        main()
