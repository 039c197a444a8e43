"""Cost of recording every operation of a step: time against a plain step, and bytes.

    torchrun --standalone --nproc-per-node 1 benchmarks/bench_operations.py [--json FILE]

A step is zero_grad, one forward and backward, all_reduce, AdamW. Plain steps, steps with a recorder, and steps with a
recorder of operations run in turn, each on a model of its own: a transformer encoder of two layers (371 operations) and
the model of examples/train_lm.py (3,007 small operations). Aims: at most 8 and 20 times the plain step.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from _interrupt import quiet_interrupt
from _measure import (
    Variant,
    measure,
    parse,
    print_aims,
    print_table,
    process_group,
    summarize,
    verdicts,
    write_results,
)
from bench_debug import MAIN_JOB, language_model
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp.debug import Recorder
from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.records import RANK_FILE

ENCODER = "transformer encoder"
TRACED = "with operations"
AIMS = {ENCODER: 8.0, MAIN_JOB: 20.0}
WIDTH, HEADS, LAYERS, BATCH, SEQUENCE = 128, 4, 2, 8, 32
EVERY_STEP = range(1, 10**9)
Made = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print on rank 0, write JSON if asked."""
    arguments = parse_arguments(given)
    with process_group():
        run(arguments)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    return parse(parser, given)


def run(arguments: argparse.Namespace) -> None:
    """Collective: measure the steps of each model."""
    results = {}
    for name in arguments.models:
        title = f"step of {name}, {dist.get_world_size()} ranks"
        with ExitStack() as recorders:
            folders: list[Path] = []
            summary = summarize(measure(partial(_steps, MODELS[name], recorders, folders), arguments))
            size = _size(folders[-1])
        ratios = {TRACED: summary[TRACED]["median_ratio"]}
        aims = {TRACED: AIMS[name]}
        results[title] = {"variants": summary, "aims": aims, "verdicts": verdicts(ratios, aims), **size}
        if dist.get_rank() == 0:
            print_table(title, summary)
            print_aims(ratios, aims)
            print(
                f"{size['operations']:,} operations, {size['step_bytes']:,} bytes a step, {size['once_bytes']:,} once"
            )
    write_results(arguments, results)


def encoder() -> Made:
    """An encoder with dropout, and its loss."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True)
    batch = torch.randn(BATCH, SEQUENCE, WIDTH)
    module = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    return module, lambda model: model(batch).square().mean()


MODELS: dict[str, Callable[[], Made]] = {ENCODER: encoder, MAIN_JOB: language_model}


def _steps(make: Callable[[], Made], recorders: ExitStack, folders: list[Path]) -> list[Variant]:
    """The variants, the reference first. Recorders write until ``recorders`` is closed; the folder of the operations is
    appended to ``folders``."""
    variants = []
    for name in ("plain", "plain again", "recorder", TRACED):
        module, loss_of = make()
        model = LegacyDistributedDataParallel(module, checks=Checks("off", same_data="allow"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        if not name.startswith("plain"):
            folder = Path(recorders.enter_context(TemporaryDirectory()))
            operations = EVERY_STEP if name == TRACED else ()
            recorders.enter_context(Recorder(model, folder, optimizer=optimizer, operations=operations))
            folders.append(folder)
        variants.append(Variant(name, partial(_step, model, optimizer, loss_of)))
    return variants


def _step(
    model: LegacyDistributedDataParallel, optimizer: torch.optim.Optimizer, loss_of: Callable[[nn.Module], torch.Tensor]
) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    model.all_reduce()
    optimizer.step()


def _size(folder: Path) -> dict[str, int]:
    """The number of operations of a step, the bytes of their line, and the bytes of all declarations."""
    path = folder / RANK_FILE.format(dist.get_rank())
    lines = path.read_bytes().splitlines(keepends=True)
    with RankTrace(path) as trace:
        counts = list(trace.operation_counts.values())
    return {
        "operations": round(statistics.median(counts)),
        "step_bytes": round(statistics.median(len(line) for line in lines if line.startswith(b'{"line":"operations"'))),
        "once_bytes": sum(len(line) for line in lines if line.startswith(b'{"line":"operation"')),
    }


if __name__ == "__main__":
    with quiet_interrupt():
        main()
