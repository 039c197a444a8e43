"""Cost of the digests of replicas in a training step at level "info".

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_digest.py [--json FILE]

A step is zero_grad, one forward and backward, all_reduce, AdamW. Two figures for each of three models: the model of
examples/train_lm.py, 1,000 tensors of 16 elements, and the transformer of bench_step.py.

- Share: the time in all functions of the digests, divided by the time of the same steps. Part of it is the time to
  fetch weights from memory, which the forward right behind the digest needs, too.
- Longer: by how much a step takes longer than a step of the same model, in turn, in which these functions do nothing.
  The placement of memory is the same in both. Aim: at most 0.01 each.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from _interrupt import quiet_interrupt
from _measure import Variant, measure, parse, process_group, round_ratios, write_results
from _workloads import LAYERS, TinyTensors, mean_square, predict_tokens, tokens, workload_named
from bench_agree import median_interval
from bench_debug import MAIN_JOB, language_model
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel

AIM = 0.01
# All that runs outside of a difference: the digest, its place in the header, and the notes about steps.
TIMED = ("begin_forward", "digest_of", "note_agreement", "compare", "end_call", "begin_step", "end_step", "covers")
RESULTS_WITHOUT = {"digest_of": 0, "covers": False}  # None for the others
TENSORS, NUMEL = 1000, 16
Made = tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print on rank 0, write JSON if asked."""
    arguments = parse_arguments(given)
    with process_group():
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Collective: measure the share for each model."""
    results = {}
    for name in arguments.models:
        title = f"step of {name}, {dist.get_world_size()} ranks"
        results[title] = _share(MODELS[name], arguments)
        if dist.get_rank() == 0:
            row = results[title]
            times = f"digests {row['digest_ms']:.3f} ms of {row['step_ms']:.1f} ms"
            print(
                f"{title:45}{times}: {row['share']:.4f}, longer by {row['longer']:.4f}   {row['verdict']}", flush=True
            )
    write_results(arguments, results)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), help="default: all")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the transformer (default: %(default)s)")
    return parse(parser, given)


def _small(_: argparse.Namespace) -> Made:
    batch = torch.randn(1)
    return TinyTensors(TENSORS, NUMEL), lambda model: mean_square(model, batch)


def _transformer(arguments: argparse.Namespace) -> Made:
    (batch,) = tokens(1)
    return workload_named("transformer", layers=arguments.layers).build(), lambda model: predict_tokens(model, batch)


MODELS: dict[str, Callable[[argparse.Namespace], Made]] = {
    MAIN_JOB: lambda _: language_model(),
    "1,000 small tensors": _small,
    "transformer": _transformer,
}


def _share(make: Callable[[argparse.Namespace], Made], arguments: argparse.Namespace) -> dict[str, Any]:
    built: list[list[float]] = []  # seconds of the digests in each step of each building
    digesting, without = measure(partial(_build, make, arguments, built), arguments)
    taken = [seconds for of_steps in built for seconds in of_steps[arguments.warm_up :]]
    share = sum(taken) / sum(digesting.seconds)
    ratios = round_ratios(digesting, without)
    longer = statistics.median(ratios) - 1
    return {
        "n": len(taken),
        "step_ms": 1e3 * statistics.fmean(digesting.seconds),
        "digest_ms": 1e3 * statistics.fmean(taken),
        "share": share,
        "longer": longer,
        "longer_95": [bound - 1 for bound in median_interval(ratios)],
        "aim": AIM,
        "verdict": "met" if longer <= AIM else "missed",
    }


def _build(
    make: Callable[[argparse.Namespace], Made], arguments: argparse.Namespace, built: list[list[float]]
) -> list[Variant]:
    """Steps with and without digests, of one model; steps with digests append to a new list in ``built``."""
    module, loss_of = make(arguments)
    # Through many layers little is left of the data: gradients may be equal to the last bit.
    model = LegacyDistributedDataParallel(module, checks="info")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    watch = _Stopwatch(model._synchronizer.digests)
    taken: list[float] = []
    built.append(taken)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model).backward()
        model.all_reduce()
        optimizer.step()

    def digesting_step() -> None:
        watch.seconds = 0.0
        step()
        taken.append(watch.seconds)

    def step_without() -> None:
        watch.is_on = False
        try:
            step()
        finally:
            watch.is_on = True

    return [Variant("info", digesting_step), Variant("without digests", step_without)]


class _Stopwatch:
    """Adds up the seconds in the methods ``TIMED`` of the digests; a call inside another counts once.

    ``is_on``: False makes the methods do nothing.
    """

    def __init__(self, digests: Any) -> None:
        self.seconds = 0.0
        self.is_on = True
        self._is_running = False
        self._digests = digests
        for name in TIMED:
            setattr(digests, name, self._timed(name, getattr(digests, name)))

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.is_on:
                return self._skip(name, *args)
            if self._is_running:
                return method(*args, **kwargs)
            self._is_running, start = True, time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self._is_running = False

        return timed

    def _skip(self, name: str, *args: Any) -> Any:
        if name == "digest_of":  # the next forward takes the digest for the call after this call
            self._digests._next_call = args[0].number + 1
        return RESULTS_WITHOUT.get(name)


if __name__ == "__main__":
    with quiet_interrupt():
        main()
