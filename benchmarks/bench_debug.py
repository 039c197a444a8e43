"""Cost of replica checks and recorders: in a training step, and per byte.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_debug.py step [--json FILE]
    torchrun --standalone --nproc-per-node 1 benchmarks/bench_debug.py digest [--json FILE]

Measured like bench_all_reduce.py: variants interleaved round by round, ratios taken within a round. Two questions:

step     a whole training step with checks="info", with "detail", with check_replicas() after it, and with a recorder
         of all steps, against "off"; "off" a second time is the control: its distance from 1 is noise.
         Two models: the model of examples/train_lm.py, and 1,000 small tensors. Aims: detail <= 1.25; a check every
         10 steps <= 1.05, computed as a tenth of the cost of a check after every step; on the first model a recorder
         <= 1.30 for every step and <= 1.05 for every 10th, computed in the same way
digest   the fingerprint of tensors of several sizes, and of 1,000 small tensors together, against a copy of the bytes
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from _checkout import ROOT
from _interrupt import quiet_interrupt
from _measure import Variant, measure, parse, print_table, process_group, summarize, write_results
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp._replicas.state import digest_all
from legacy_ddp.debug import Recorder, check_replicas, digest

sys.path.append(str(ROOT / "examples"))
from train_lm import ByteModel, summed_loss

EVERY = 10
AIMS = {"detail": 1.25, f"check every {EVERY} steps": 1.05}
MAIN_JOB_AIMS = {**AIMS, "record every step": 1.30, f"record every {EVERY} steps": 1.05}
SMALL_WIDTH, SMALL_LAYERS = 48, 500
DIGEST_BYTES = (4 * 2**10, 64 * 2**10, 2**20, 8 * 2**20, 256 * 2**20)


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print on rank 0, write JSON if asked."""
    arguments = parse_arguments(given)
    with process_group():
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Collective: run the measurement of the subcommand."""
    results = {"step": _answer_step, "digest": _answer_digest}[arguments.question](arguments)
    write_results(arguments, results)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=("step", "digest"))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    parser.add_argument("--max-bytes", type=int, default=DIGEST_BYTES[-1], help="largest tensor (default: %(default)s)")
    return parse(parser, given)


def language_model() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """The main job's model and the loss of a micro-batch."""
    windows = torch.randint(256, (16, 65))
    return ByteModel(), lambda model: summed_loss(model, windows)[0] / windows.numel()


def small_tensors() -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """1,000 tensors of 2,304 and 48 elements."""
    layers = [nn.Linear(SMALL_WIDTH, SMALL_WIDTH) for _ in range(SMALL_LAYERS)]
    batch = torch.randn(32, SMALL_WIDTH)
    return nn.Sequential(*layers), lambda model: model(batch).square().mean()


MAIN_JOB = "train_lm"
MODELS = {MAIN_JOB: language_model, "1,000 small tensors": small_tensors}


def _answer_step(arguments: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for name in arguments.models:
        with ExitStack() as recorders:
            summary = summarize(measure(partial(_steps, MODELS[name], recorders), arguments))
        ratios = {name: summary[name]["median_ratio"] for name in ("detail", "record every step")}
        for what in ("check", "record"):
            ratios[f"{what} every {EVERY} steps"] = 1 + (summary[f"{what} every step"]["median_ratio"] - 1) / EVERY
        title = f"step of {name}, {dist.get_world_size()} ranks"
        aims = MAIN_JOB_AIMS if name == MAIN_JOB else AIMS
        results[title] = {"aims": aims, "ratios": ratios, "variants": summary}
        if dist.get_rank() == 0:
            print_table(title, summary)
            for what, ratio in ratios.items():
                print(f"{what:41}{ratio:25.3f}{_verdict(ratio, aims.get(what))}")
    return results


def _verdict(ratio: float, aim: float | None) -> str:
    return "" if aim is None else f"   aim {aim:.2f}: {'met' if ratio <= aim else 'missed'}"


def _steps(
    make: Callable[[], tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]], recorders: ExitStack
) -> list[Variant]:
    """The variants, the reference first. Recorders write until ``recorders`` is closed."""
    levels = {"off": "off", "off again": "off", "info": "info", "detail": "detail"}
    levels |= {"check every step": "info", "record every step": "off"}
    variants = []
    for name, level in levels.items():
        module, loss_of = make()
        # Through 500 layers little is left of the data: gradients are equal to the last bit.
        model = LegacyDistributedDataParallel(module, checks=Checks(level, same_data="allow"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        if name.startswith("record"):
            folder = recorders.enter_context(TemporaryDirectory())
            recorders.enter_context(Recorder(model, folder, optimizer=optimizer))
        variants.append(Variant(name, partial(_step, model, optimizer, loss_of, checked=name.startswith("check"))))
    return variants


def _step(
    model: LegacyDistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[nn.Module], torch.Tensor],
    *,
    checked: bool,
) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    model.all_reduce()
    optimizer.step()
    if checked:
        check_replicas(model, optimizer, raises=True)


def _answer_digest(arguments: argparse.Namespace) -> dict[str, Any]:
    results = {}
    for size_bytes in (size for size in DIGEST_BYTES if size <= arguments.max_bytes):
        tensor = torch.randn(size_bytes // 4)
        results[f"{size_bytes // 1024} KiB"] = _throughput(arguments, [tensor], partial(digest, tensor))
    tensors = [torch.randn(SMALL_WIDTH, SMALL_WIDTH) for _ in range(1000)]
    results["1,000 x 9 KiB"] = _throughput(arguments, tensors, partial(digest_all, tensors))
    return results


def _throughput(arguments: argparse.Namespace, tensors: Sequence[torch.Tensor], taken: Callable[[], object]) -> Any:
    copies = [torch.empty_like(tensor) for tensor in tensors]
    size_bytes = sum(tensor.nbytes for tensor in tensors)
    copying = partial(torch._foreach_copy_, copies, tensors)
    summary = summarize(measure(lambda: [Variant("copy", copying), Variant("digest", taken)], arguments))
    for row in summary.values():
        row["gigabytes_per_second"] = size_bytes / row["median_ms"] / 1e6
    if dist.get_rank() == 0:
        print_table(f"{len(tensors)} x {size_bytes // len(tensors) // 1024} KiB", summary)
        speeds = [f"{name}: {row['gigabytes_per_second']:.1f} GB/s" for name, row in summary.items()]
        print("   ".join(speeds), flush=True)
    return summary


if __name__ == "__main__":
    with quiet_interrupt():
        main()
