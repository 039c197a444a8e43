"""Cost of comparing two traces: seconds and memory of the command, for traces of growing length.

    python benchmarks/bench_trace.py [--json FILE]

The script writes traces as of a training with AdamW (six entries for each parameter and step). `legacy-ddp diff`
compares each trace, in a separate process: with an equal trace, with a trace that differs in all entries from step 10
on, and rank with rank. The start of Python and torch is included. Aims: under 5 s and 500 MB for two traces of 1,000
steps and 300 parameters; time that grows no faster than the traces.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from _checkout import environment
from _interrupt import quiet_interrupt
from _measure import machine, results_path, save

from legacy_ddp.debug._trace.records import PHASES, CallFacts, Environment, Names, Section, Values, Writer

AIM_STEPS, AIM_SECONDS, AIM_MEGABYTES = 1000, 5.0, 500
RANKS, FIRST_DIFFERENCE = 2, 10
KINDS = {
    "local_gradients": ("gradient of",),
    "reduced_gradients": ("gradient of",),
    "optimizer": ("exp_avg of", "exp_avg_sq of", "step of"),
    "parameters": ("parameter",),
}


def main(given: Sequence[str] | None = None) -> None:
    """Write, compare, print, and write JSON if asked."""
    arguments = parse_arguments(given)
    results = {}
    print(f"{'steps':>6}{'compared':>20}{'traces':>10}{'seconds':>9}{'memory':>9}")
    for steps in arguments.steps:
        with TemporaryDirectory() as folder:
            results[str(steps)] = answer(Path(folder), steps, arguments)
    if AIM_STEPS in arguments.steps and arguments.parameters == 300:
        print(f"aim at {AIM_STEPS} steps: {AIM_SECONDS} s and {AIM_MEGABYTES} MB")
    save(arguments, machine(), results)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[250, 500, 1000, 2000], help="default: %(default)s")
    parser.add_argument("--parameters", type=int, default=300, help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="times that each is compared (default: %(default)s)")
    parser.add_argument("--json", type=results_path, help="write medians and the environment here")
    arguments = parser.parse_args(given)
    for problem in _problems(arguments):
        parser.error(problem)
    return arguments


def _problems(arguments: argparse.Namespace) -> Iterable[str]:
    if (steps := min(arguments.steps)) < FIRST_DIFFERENCE:
        yield f"--steps are too few to differ: got {steps}, expected {FIRST_DIFFERENCE} or more"
    for option, count in {"parameters": arguments.parameters, "repeats": arguments.repeats}.items():
        if count < 1:
            yield f"--{option} is a count: got {count}, expected 1 or more"


def answer(folder: Path, steps: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Median seconds, greatest memory and bytes read, by way of comparison."""
    one, equal, other = (folder / name for name in ("one", "equal", "other"))
    for path, differs in ((one, False), (equal, False), (other, True)):
        write_run(path, steps, arguments.parameters, differs=differs)
    ways = {"equal": (one, equal), "different": (one, other), "ranks of one": (one,)}
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(arguments.repeats):
        for name, paths in ways.items():
            runs[name].append(compare(paths, status=int(name == "different")))
    summary = {}
    for name, paths in ways.items():
        megabytes = sum(file.stat().st_size for path in paths for file in path.iterdir()) / 1e6
        seconds, peak = statistics.median(run[0] for run in runs[name]), max(run[1] for run in runs[name])
        summary[name] = {
            "n": len(runs[name]),
            "megabytes": megabytes,
            "median_seconds": seconds,
            "peak_megabytes": peak,
        }
        print(f"{steps:6}{name:>20}{megabytes:7.0f} MB{seconds:9.2f}{peak:6.0f} MB", flush=True)
    return summary


def compare(paths: Iterable[Path], *, status: int) -> tuple[float, float]:
    """Seconds and peak memory in MB of one comparison, which must end with the given exit status."""
    command = [sys.executable, "-m", "legacy_ddp", "diff", *map(str, paths)]
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment())
    _, ended, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(ended)
    if process.returncode != status:
        sys.exit(f"{' '.join(command)} ended with {process.returncode}, expected {status}")
    return seconds, usage.ru_maxrss / 1e3


def write_run(folder: Path, steps: int, parameters: int, *, differs: bool) -> None:
    """A trace of ``RANKS`` equal ranks; ``differs``: all entries are changed from one step on."""
    names = [f"layers.{index // 2}.{'bias' if index % 2 else 'weight'}" for index in range(parameters)]
    for rank in range(RANKS):
        environment = Environment(
            rank, RANKS, 1, 1, "2026-01-01T00:00:00+00:00", "0" * 16, "0" * 16, {}, tuple(sorted(names))
        )
        writer = Writer(folder, environment)
        for step in range(1, steps + 1):
            changed = differs and step >= FIRST_DIFFERENCE
            for phase in KINDS:
                if phase == "reduced_gradients":
                    writer.call(step, _call(step))
                writer.section(step, _section(phase, step, names, changed=changed))
            writer.flush()
        writer.close(steps, "closed")


def _section(phase: str, step: int, names: Sequence[str], *, changed: bool) -> Section:
    entries = tuple(f"{kind} {name!r}" for kind in KINDS[phase] for name in names)
    first = (step << 28) + (PHASES.index(phase) << 24) + (int(changed) << 60)
    words = tuple(f"{first + index:016x}" for index in range(len(entries)))
    norms = tuple(1 / (step + index + 1.1) for index in range(len(entries)))
    return Section(Names(phase, entries, ("float32 (64, 64)",) * len(entries)), Values(words, norms))


def _call(step: int) -> CallFacts:
    return CallFacts(step, 1, None, True, RANKS, 1.5, True, 0, {"agree": 0.001}, 0.001, "0" * 16, 0, (), True)


if __name__ == "__main__":
    with quiet_interrupt():
        main()
