"""Cost of a call on a device: copies, digests, waits of the host, launches, and a whole training step.

    torchrun --standalone --nproc-per-node 1 benchmarks/bench_gpu.py [--device KIND] [--json FILE]
    torchrun --standalone --nproc-per-node 2 benchmarks/bench_gpu.py [--device KIND] [--json FILE]

The ranks use the backend that torch has for the device, and share devices if there are fewer than ranks. With one rank
the explicit call does not communicate, while torch DDP communicates for each of its buckets: the result is the work on
the device. Without a device the script prints a message and ends with status 1. Measurements:

copies   packing loose gradients into the flat tensor, and copying the result out of the flat tensor
         (gradient_as_bucket_view=False), against one copy_ of the same bytes, which reads and writes each byte once,
         too; timed by events on the stream of the device, so host work counts while the device is idle. Aim: at least
         0.80 of the speed of copy_. The digest of all gradients is printed without an aim; it reads, and waits
calls    on CUDA: one call in a profile, with gradients as views or to be packed: waits of the host, launches, kernels;
         also the error of torch.cuda.set_sync_debug_mode("error"), which checks torch's own calls only. Aim for
         checks="info": no wait
step     a whole step, with a wait for the device at its end

Copies and digests are measured per rank and shown for rank 0: ranks on one device share its memory bandwidth.
"""

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from _device_calls import complaint, during_call, kernels, launches, record, waits
from _interrupt import quiet_interrupt
from _measure import Summary, Variant, measure, parse, print_table, summarize, write_results
from _workloads import WORKLOADS, WRAPPERS, Workload, step
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp._check_settings import CHECKS_VARIABLE
from legacy_ddp._memory.flat_buffer import DENSE, FlatBuffer
from legacy_ddp._memory.plan import Planner, parameter_columns
from legacy_ddp._replicas.state import digest_all
from legacy_ddp._settings import Settings
from legacy_ddp._torch import device as devices

SHARE_AIM, AIMED_AT = 0.80, ("pack", "unpack")
MODELS = ("transformer", "embedding")


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print on rank 0, write JSON if asked."""
    arguments = parse_arguments(given)
    if not torch.get_device_module(arguments.device).is_available():
        sys.exit(f"no device {arguments.device!r}: torch sees none, and nothing here can be measured without one")
    with _process_group(arguments.device) as device:
        results: dict[str, Any] = {"device": devices.device_name(str(device)), "backend": dist.get_backend()}
        for model in arguments.models:
            results[model] = {
                "copies": _answer_copies(model, device, arguments),
                "calls": _answer_calls(WORKLOADS[model], model, device),
                "step": _answer_step(WORKLOADS[model], model, device, arguments),
            }
        write_results(arguments, results)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--device", default="cuda", help="kind of device that torch knows; default: cuda")
    parser.add_argument("--without-ddp", action="store_true", help="leave out torch DDP, which not all devices can run")
    return parse(parser, given)


@contextmanager
def _process_group(kind: str) -> Iterator[torch.device]:
    """Collective: this rank's device."""
    if "RANK" not in os.environ:
        sys.exit("start with: torchrun --standalone --nproc-per-node 1 benchmarks/bench_gpu.py")
    if os.environ.get(CHECKS_VARIABLE):
        sys.exit(f"{CHECKS_VARIABLE} is set, expected not to be: it overrides the levels that are compared")
    module, local_rank = torch.get_device_module(kind), int(os.environ["LOCAL_RANK"])
    device = torch.device(kind, local_rank % module.device_count())
    if hasattr(module, "set_device"):
        module.set_device(device)
    if int(os.environ["LOCAL_WORLD_SIZE"]) > module.device_count():
        # NCCL refuses two ranks of one host on one device. With these names every rank is on a host of its own.
        os.environ.update(NCCL_HOSTID=f"rank-{local_rank}", NCCL_SOCKET_IFNAME="lo")
    dist.init_process_group(f"cpu:gloo,{kind}:{dist.Backend.default_device_backend_map[kind]}")
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _answer_copies(model: str, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    variants = measure_on_device(partial(copies, WORKLOADS[model].build().to(device)), arguments, device)
    with torch.device("meta"):
        size_bytes = sum(parameter.nbytes for parameter in WORKLOADS[model].build().parameters())
    summary = with_speeds(summarize(variants), size_bytes)
    found = verdicts(summary)
    if dist.get_rank() == 0:
        print_table(f"{model}, copies of {size_bytes / 2**20:.1f} MiB", summary)
        for name, row in summary.items():
            aim = f"   aim {SHARE_AIM:.2f}: {found[name]}" if name in found else ""
            print(f"{name:41}{row['gigabytes_per_second']:10.1f} GB/s{row['share_of_copy']:9.2f}{aim}", flush=True)
    return {"aim": SHARE_AIM, "verdicts": found, "variants": summary}


def copies(module: nn.Module) -> list[Variant]:
    """The variants, the reference first; all handle the same bytes."""
    planner = Planner(Settings(gradient_as_bucket_view=False))
    plan = planner.plan(parameter_columns(module))
    (buffer,) = plan.buffers
    for parameter in plan.parameters:
        parameter.grad = torch.randn_like(parameter)
    gradients = [parameter.grad for parameter in plan.parameters]
    _pack(buffer, gradients)  # allocates the memory
    source = torch.cat([gradient.flatten() for gradient in gradients])
    return [
        Variant("copy_ of the same bytes", partial(torch.empty_like(source).copy_, source)),
        Variant("pack", partial(_pack, buffer, gradients)),
        Variant("unpack", partial(buffer.alias, plan.parameters, [DENSE] * len(gradients), None)),
        Variant("digest", partial(digest_all, gradients)),
    ]


@torch.no_grad()
def _pack(buffer: FlatBuffer, gradients: Sequence[torch.Tensor]) -> None:
    buffer.look_at(gradients, are_used=True)
    buffer.pack(gradients, copy=True)


def measure_on_device(
    build: Callable[[], list[Variant]], arguments: argparse.Namespace, device: torch.device
) -> list[Variant]:
    """Like :func:`_measure.measure`, with the clock of the device: from the first launch to the end of the last."""
    pooled: list[Variant] = []
    for _ in range(arguments.repeats):
        variants = build()
        for round_number in range(-arguments.warm_up, arguments.rounds):
            shift = round_number % len(variants)
            for variant in variants[shift:] + variants[:shift]:
                seconds = _device_seconds(variant.run, device)
                if round_number >= 0:
                    variant.seconds.append(seconds)
        for variant, earlier in zip(variants, pooled, strict=False):
            variant.seconds[:0] = earlier.seconds
        pooled = variants
    return pooled


def _device_seconds(run: Callable[[], object], device: torch.device) -> float:
    """By events on the device, where it has them."""
    make_event = getattr(torch.get_device_module(device), "Event", None)
    devices.synchronize(device)
    if make_event is None:
        started = perf_counter()
        run()
        devices.synchronize(device)
        return perf_counter() - started
    begin, end = (make_event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def with_speeds(summary: Summary, size_bytes: int) -> Summary:
    """``summary`` with the bytes per second of each row (each byte counted once) and its share of the first row.

    The share is the median of the rounds' ratios, not the ratio of the medians.
    """
    for row in summary.values():
        row["gigabytes_per_second"] = size_bytes / row["median_ms"] / 1e6
        row["share_of_copy"] = 1 / row["median_ratio"]
    return summary


def verdicts(summary: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """The verdicts on rows with an aim."""
    return {name: "met" if summary[name]["share_of_copy"] >= SHARE_AIM else "missed" for name in AIMED_AT}


def _answer_calls(workload: Workload, model: str, device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"verdict": "not measured: torch's profiler shows waits of the host on CUDA alone"}
    results: dict[str, Any] = {}
    batch = workload.batches(1)[0].to(device)
    for level in ("off", "info"):
        for set_to_none, what in {False: "views", True: "to pack"}.items():
            held = LegacyDistributedDataParallel(workload.build().to(device), checks=level)
            refill = partial(_refill, held, workload, batch, set_to_none)
            results[f"{level}, {what}"] = _calls_of(held, refill)
    waited = [_waited(told) for name, told in results.items() if name.startswith("info")]
    results["verdict"] = "missed" if any(waited) else "met"
    if dist.get_rank() == 0:
        _print_calls(model, results)
    return results


def _calls_of(held: LegacyDistributedDataParallel, refill: Callable[[], object]) -> dict[str, Any]:
    for _ in range(3):  # buffers, connections and views are there from the second call on
        refill()
        held.all_reduce()
    refill()
    events = record(held.all_reduce)
    names = during_call(events)
    told: dict[str, Any] = {
        "waits_per_call": waits(names),
        "launches_per_call": launches(names),
        "kernels_per_call": kernels(events),
    }
    refill()
    told["torch_complains_of"] = complaint(held.all_reduce)
    return told


def _waited(told: Mapping[str, Any]) -> bool:
    return bool(told["waits_per_call"]) or told.get("torch_complains_of", "none") != "none"


def _refill(held: nn.Module, workload: Workload, batch: torch.Tensor, set_to_none: bool) -> None:
    held.zero_grad(set_to_none=set_to_none)
    workload.loss(held, batch).backward()


def _print_calls(model: str, results: Mapping[str, Any]) -> None:
    print(f"\n{model}, one call")
    for name, told in results.items():
        for what, counts in told.items() if isinstance(told, dict) else ():
            words = counts if isinstance(counts, str) else ", ".join(f"{count} {key}" for key, count in counts.items())
            print(
                textwrap.fill(f"{name:15}{what.replace('_', ' ')}: {words or 'none'}", 80, subsequent_indent=" " * 17)
            )
    print(f"aim, info: no wait of the host: {results['verdict']}", flush=True)


def _answer_step(
    workload: Workload, model: str, device: torch.device, arguments: argparse.Namespace
) -> dict[str, Summary]:
    results = {}
    for set_to_none in (True, False):
        title = f"zero_grad(set_to_none={set_to_none})"
        build = partial(_steps, workload, device, set_to_none, with_ddp=not arguments.without_ddp)
        results[title] = summarize(measure(build, arguments))
        if dist.get_rank() == 0:
            print_table(f"{model}, step, {title}", results[title])
    return results


def _steps(workload: Workload, device: torch.device, set_to_none: bool, *, with_ddp: bool) -> list[Variant]:
    batches = [batch.to(device) for batch in workload.batches(1)]
    variants = []
    wrappers = {name: wrap for name, wrap in WRAPPERS.items() if with_ddp or not name.startswith("torch DDP")}
    for name, wrap in {**wrappers, "local compute alone": lambda module: module}.items():
        model = wrap(workload.build().to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        run = partial(step, model, optimizer, workload.loss, batches, set_to_none=set_to_none)
        wait = partial(devices.synchronize, device)
        variants.append(Variant(name, partial(_run_and_wait, run, wait), wait))
    return variants


def _run_and_wait(run: Callable[[], object], wait: Callable[[], object]) -> None:
    run()
    wait()


if __name__ == "__main__":
    with quiet_interrupt():
        main()
