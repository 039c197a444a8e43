"""What does the explicit call cost? Ours, torch DDP, a bare all_reduce and one collective per parameter, in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_all_reduce.py [--json FILE]

Every variant has its own copy of one model; all are run once per round, in an order that rotates from round to round,
so that whatever else the machine does hits all of them alike, and everything is built several times, because where
memory happens to lie is worth some per cent. A ratio is the median of the rounds' ratios. Two questions:

call   all_reduce() alone, the ranks aligned by a barrier first, so that waiting for a late rank is not counted;
       "fresh" is the memory that one run allocates on its rank, as torch's profiler counts it (in a step: activations
       and gradients, too)
step   a whole training step: zero_grad, `update-freq` times forward and backward, synchronisation, SGD
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from legacy_ddp import LegacyDistributedDataParallel

VOCABULARY, WIDTH, LAYERS, HEADS, SEQUENCE, BATCH = 3328, 256, 10, 4, 32, 2


class Transformer(nn.Module):
    """8.8 million parameters in 123 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(self.embedding(tokens))) @ self.embedding.weight.T


@dataclass
class Variant:
    """One way to do it; ``run`` is what is timed, ``prepare`` comes before the barrier."""

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    seconds: list[float] = field(default_factory=list)
    fresh_bytes: int = 0


def main() -> None:
    """Measure, print two tables on rank 0, write JSON if asked."""
    arguments = _arguments()
    with _process_group():
        torch.set_num_threads(1)
        tables: dict[str, Callable[[], list[Variant]]] = {"call": _calls}
        for update_freq in (1, 4):
            for set_to_none in (True, False):
                name = f"step, update-freq {update_freq}, zero_grad(set_to_none={set_to_none})"
                tables[name] = partial(_steps, update_freq, set_to_none)
        results = {}
        for title, build in tables.items():
            results[title] = _summary(_measure(build, arguments))
            if dist.get_rank() == 0:
                _print_table(title, results[title])
        if dist.get_rank() == 0 and arguments.json:
            document = {"environment": _environment(), "results": results}
            arguments.json.write_text(json.dumps(document, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="times that all is built (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds of each (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before them (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write medians, ratios and the environment here")
    return parser.parse_args()


@contextmanager
def _process_group() -> Iterator[None]:
    if "RANK" not in os.environ:
        sys.exit("start with: torchrun --standalone --nproc-per-node 2 benchmarks/bench_all_reduce.py")
    dist.init_process_group("gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def _calls() -> list[Variant]:
    """The first variant is what the others are compared with."""
    reference = Transformer()
    flat = torch.ones(sum(parameter.numel() for parameter in reference.parameters()))
    tensors = [torch.ones_like(parameter) for parameter in reference.parameters()]
    variants = [Variant("bare all_reduce of the same bytes", partial(dist.all_reduce, flat))]
    for level in ("off", "info"):
        held = LegacyDistributedDataParallel(Transformer(), checks=level)
        variants.append(Variant(f"ours, {level}, gradients are views", held.all_reduce, partial(_refill, held, False)))
    loose = LegacyDistributedDataParallel(Transformer(), checks="off")
    variants.append(Variant("ours, off, gradients to pack", loose.all_reduce, partial(_refill, loose, True)))
    copied = LegacyDistributedDataParallel(Transformer(), checks="off", gradient_as_bucket_view=False)
    prepare = partial(_refill, copied, False)
    variants.append(Variant("ours, off, gradient_as_bucket_view=False", copied.all_reduce, prepare))
    variants.append(Variant("one collective per parameter", lambda: [dist.all_reduce(tensor) for tensor in tensors]))
    return variants


def _refill(model: nn.Module, set_to_none: bool) -> None:
    """A real backward pass, into gradients that are kept or made anew."""
    model.zero_grad(set_to_none=set_to_none)
    tokens = torch.arange(SEQUENCE)[None]
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()


def _steps(update_freq: int, set_to_none: bool) -> list[Variant]:
    wrappers: dict[str, Callable[[nn.Module], nn.Module]] = {
        "torch DDP": DistributedDataParallel,
        "torch DDP, gradient_as_bucket_view": partial(DistributedDataParallel, gradient_as_bucket_view=True),
        "ours, off": partial(LegacyDistributedDataParallel, checks="off"),
        "ours, info": partial(LegacyDistributedDataParallel, checks="info"),
        "local compute alone": lambda module: module,
    }
    tokens = torch.randint(VOCABULARY, (update_freq, BATCH, SEQUENCE))
    variants = []
    for name, wrap in wrappers.items():
        model = wrap(Transformer())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        variants.append(Variant(name, partial(_step, model, optimizer, tokens, set_to_none)))
    return variants


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, set_to_none: bool) -> None:
    optimizer.zero_grad(set_to_none=set_to_none)
    for index, batch in enumerate(tokens):
        is_last = index == len(tokens) - 1
        with model.no_sync() if hasattr(model, "no_sync") and not is_last else nullcontext():
            logits = model(batch)
            nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()
    if isinstance(model, LegacyDistributedDataParallel):
        model.all_reduce()
    optimizer.step()


def _measure(build: Callable[[], list[Variant]], arguments: argparse.Namespace) -> list[Variant]:
    """The variants with the seconds of all their buildings."""
    pooled: list[Variant] = []
    for _ in range(arguments.repeats):
        variants = build()
        _time(variants, arguments.rounds, arguments.warm_up)
        for variant, earlier in zip(variants, pooled, strict=False):
            variant.seconds[:0] = earlier.seconds
        pooled = variants
    for variant in pooled:
        variant.fresh_bytes = _fresh_bytes(variant)
    return pooled


def _time(variants: list[Variant], rounds: int, warm_up: int) -> None:
    for round_number in range(-warm_up, rounds):
        shift = round_number % len(variants)
        for variant in variants[shift:] + variants[:shift]:
            variant.prepare()
            dist.barrier()
            start = time.perf_counter()
            variant.run()
            elapsed = time.perf_counter() - start
            if round_number >= 0:
                variant.seconds.append(elapsed)


def _fresh_bytes(variant: Variant) -> int:
    variant.prepare()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        variant.run()
    return sum(max(0, event.self_cpu_memory_usage) for event in profiler.events())


def _summary(variants: list[Variant]) -> dict[str, dict[str, float]]:
    reference = variants[0].seconds
    summary = {}
    for variant in variants:
        ratios = sorted(own / other for own, other in zip(variant.seconds, reference, strict=True))
        summary[variant.name] = {
            "n": len(ratios),
            "median_ms": 1e3 * statistics.median(variant.seconds),
            "p90_ms": 1e3 * statistics.quantiles(variant.seconds, n=10)[-1],
            "fresh_mib_per_run": variant.fresh_bytes / 2**20,
            "median_ratio": statistics.median(ratios),
            "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        }
    return summary


def _print_table(title: str, summary: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}\n{'':41}{'median':>9}{'p90':>9}{'ratio':>7}{'fresh':>11}")
    for name, row in summary.items():
        times = f"{row['median_ms']:7.1f}ms{row['p90_ms']:7.1f}ms{row['median_ratio']:7.2f}"
        print(f"{name:41}{times}{row['fresh_mib_per_run']:8.1f}MiB", flush=True)


def _environment() -> dict[str, object]:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "world_size": dist.get_world_size(),
        "backend": dist.get_backend(),
        "threads_per_rank": torch.get_num_threads(),
        "load_average_at_end": os.getloadavg(),
        "commit": commit.stdout.strip() or "unknown",
    }


if __name__ == "__main__":
    main()
