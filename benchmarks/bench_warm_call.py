"""CPU time of a warm call and of a step with 16 small parameters, at ``info``, on 2 ranks.

    python benchmarks/bench_warm_call.py [--against PATH] [--json FILE]

A small model shows the cost of the library alone: the gradients are 130 KiB. Every variant has two processes of its
own, because the hooks of a library on all optimizers would count for the others, too:

ours            this checkout
against         the checkout at PATH, for example of the commit before a change; the same commit shows the noise
torch DDP       the same step with DistributedDataParallel; has no call
local compute   the same step without synchronisation

The variants take turns in a random order, some steps at a time, while the others wait: load of the machine affects all
alike. The first steps of a turn are not counted: they fill the caches again. Everything is built anew in each of 5
runs. CPU time is the time of all threads of rank 0 (``time.process_time``); "this thread" is
the time of the thread that calls (``time.thread_time``). A figure is the median of the runs' medians, with the lowest
and the highest run; a ratio is taken within a run. Frames, files and changes of file are of one warm call.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from _checkout import ROOT, commit, environment
from _interrupt import quiet_interrupt
from _measure import machine, results_path, save
from _warm_call_worker import RANKS

_END_SECONDS = 30.0
_COLD_STEPS = 5
_WORKER = Path(__file__).with_name("_warm_call_worker.py")
Times = dict[str, list[float]]


class Workers:
    """The processes of a variant. Requests reach all ranks; the answer is of rank 0."""

    def __init__(self, root: Path, kind: str, store: str) -> None:
        command = [sys.executable, str(_WORKER), str(root), kind, store]
        variables = {**environment(), "PYTHONPATH": str(root)}
        self._ranks = [
            subprocess.Popen(
                [*command, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables
            )
            for rank in range(RANKS)
        ]

    def ask(self, steps: int) -> Any:
        """Let all ranks make ``steps`` steps, and return the milliseconds of each; 0: the counts of a call."""
        for process in self._ranks:
            if process.stdin is not None:
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
        lines = [process.stdout.readline() if process.stdout is not None else "" for process in self._ranks]
        if not all(lines):
            raise RuntimeError("a rank of the benchmark has ended; its error is above")
        return json.loads(lines[0])

    def close(self) -> None:
        """End the processes."""
        for process in self._ranks:
            if process.stdin is not None:
                process.stdin.close()
        for process in self._ranks:
            try:
                process.wait(_END_SECONDS)
            finally:
                process.kill()  # nothing happens to a process that has ended
                process.wait()
                if process.stdout is not None:
                    process.stdout.close()


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print, and write JSON if asked."""
    arguments = parse_arguments(given)
    variants = {"ours": (ROOT, "ours")}
    if arguments.against is not None:
        variants["against"] = (arguments.against, "ours")
    variants |= {"torch DDP": (ROOT, "torch DDP"), "local compute": (ROOT, "local compute")}
    runs: list[dict[str, Times]] = []
    for number in range(arguments.repeats):
        with _workers(variants) as workers:
            runs.append(_measure(workers, arguments))
            counts = {name: worker.ask(0) for name, worker in workers.items() if variants[name][1] == "ours"}
        print(f"run {number + 1} of {arguments.repeats} is done", file=sys.stderr, flush=True)
    results = {"cpu_ms": _figures(runs), "ratio": _ratios(runs), "counts": counts}
    _print(results)
    against = {} if arguments.against is None else {"against_commit": commit(arguments.against)}
    details = {"world_size": RANKS, "backend": "gloo", "threads_per_rank": 1, **against}
    arguments.against = str(arguments.against or "")
    save(arguments, {**machine(), **details}, results)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=_checkout, metavar="PATH", help="a second checkout")
    parser.add_argument("--repeats", type=int, default=5, help="runs, all built anew (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each variant (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps in a turn (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=40, help="steps before them (default: %(default)s)")
    parser.add_argument("--json", type=results_path, help="write the figures and the environment here")
    arguments = parser.parse_args(given)
    if min(arguments.repeats, arguments.rounds, arguments.steps, arguments.warm_up) < 1:
        parser.error("--repeats, --rounds, --steps and --warm-up are counts: expected 1 or more")
    return arguments


def _checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / "legacy_ddp" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"no checkout: got {text}, expected a folder with legacy_ddp/ in it")
    return path


@contextmanager
def _workers(variants: dict[str, tuple[Path, str]]) -> Iterator[dict[str, Workers]]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        workers = {}
        for number, (name, (root, kind)) in enumerate(variants.items()):
            workers[name] = Workers(root, kind, f"{folder}/store-{number}")
            opened.callback(workers[name].close)
        yield workers


def _measure(workers: dict[str, Workers], arguments: argparse.Namespace) -> dict[str, Times]:
    """The milliseconds of all steps of a run, by variant."""
    found: dict[str, Times] = {name: defaultdict(list) for name in workers}
    for each in workers.values():
        each.ask(arguments.warm_up)
    order, generator = list(workers), random.Random(0)
    for _ in range(arguments.rounds):
        generator.shuffle(order)
        for name in order:
            for what, times in workers[name].ask(_COLD_STEPS + arguments.steps).items():
                found[name][what] += times[_COLD_STEPS:]
    return found


def _medians(run: dict[str, Times]) -> dict[tuple[str, str], float]:
    """The median of each quantity. A loop without a call has no figure for the call."""
    return {
        (what, name): statistics.median(times)
        for name, of_variant in run.items()
        for what, times in of_variant.items()
        if what.startswith("step") or name in ("ours", "against")
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def _figures(runs: Sequence[dict[str, Times]]) -> dict[str, dict[str, float]]:
    medians = [_medians(run) for run in runs]
    return {f"{what}: {name}": _spread([of_run[what, name] for of_run in medians]) for what, name in sorted(medians[0])}


def _ratios(runs: Sequence[dict[str, Times]]) -> dict[str, dict[str, float]]:
    medians = [_medians(run) for run in runs]
    pairs = [("step", "ours", "torch DDP"), ("step", "local compute", "torch DDP")]
    if "against" in runs[0]:
        pairs += [(what, "ours", "against") for what in ("step", "call", "call, this thread")]
        pairs += [("step", "against", "torch DDP")]
    return {
        f"{what}: {own} / {other}": _spread([of_run[what, own] / of_run[what, other] for of_run in medians])
        for what, own, other in pairs
    }


def _print(results: dict[str, Any]) -> None:
    for title, unit in (("cpu_ms", "CPU, ms"), ("ratio", "ratio of CPU times")):
        print(f"\n{unit:41}{'median':>9}{'lowest':>9}{'highest':>9}")
        for name, row in results[title].items():
            print(f"{name:41}{row['median']:9.3f}{row['lowest']:9.3f}{row['highest']:9.3f}")
    print("\none warm call")
    for name, counts in results["counts"].items():
        print(f"{name:41}" + ", ".join(f"{count} {what}" for what, count in counts.items()), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with quiet_interrupt():
        main()
