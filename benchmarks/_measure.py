"""Measurement of variants: each variant once per round, in rotating order, with everything built several times.

Other load of the machine then affects all variants alike. Everything is built several times because the placement of
memory changes times by some per cent. A ratio is the median of the rounds' ratios to the first variant.
"""

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _checkout import commit

from legacy_ddp import SyncRecord
from legacy_ddp._check_settings import CHECKS_VARIABLE

Summary = dict[str, dict[str, Any]]


@dataclass
class Variant:
    """One measured variant. ``run`` is timed, ``prepare`` runs before the barrier.

    ``cpu_seconds``: processor time of all threads of this rank, which other load of the machine changes little.
    ``phases``: the seconds per phase of the timed runs that return a :class:`SyncRecord`.
    """

    name: str
    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    phases: list[Mapping[str, float]] = field(default_factory=list)


def parse(parser: argparse.ArgumentParser, given: Sequence[str] | None = None) -> argparse.Namespace:
    """The arguments: of the script, of the measurement, and of the results file."""
    parser.add_argument("--repeats", type=int, default=5, help="times that all is built (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=8, help="timed rounds of each (default: %(default)s)")
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before them (default: %(default)s)")
    parser.add_argument("--json", type=results_path, help="write medians, ratios and the environment here")
    arguments = parser.parse_args(given)
    if min(arguments.repeats, arguments.rounds) < 1 or arguments.warm_up < 0:
        parser.error("--repeats and --rounds are counts: expected 1 or more, and 0 or more for --warm-up")
    if arguments.repeats * arguments.rounds < 2:
        parser.error(f"too little to compare: got {arguments.rounds} --rounds, expected 2 or more; or raise --repeats")
    return arguments


def results_path(text: str) -> Path:
    """A writable path, checked before the measurement."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"nowhere to go: got {text}, expected a file in a folder that exists")
    return path


@contextmanager
def process_group() -> Iterator[None]:
    """Collective: gloo, one thread per rank."""
    if "RANK" not in os.environ:
        sys.exit(f"start with: torchrun --standalone --nproc-per-node 2 benchmarks/{Path(sys.argv[0]).name}")
    if os.environ.get(CHECKS_VARIABLE):
        sys.exit(f"{CHECKS_VARIABLE} is set, expected not to be: it overrides the levels that are compared")
    dist.init_process_group("gloo")
    try:
        torch.set_num_threads(1)
        yield
    finally:
        dist.destroy_process_group()


def measure(
    build: Callable[[], list[Variant]], arguments: argparse.Namespace, group: dist.ProcessGroup | None = None
) -> list[Variant]:
    """Collective: the variants of the last repeat, with the seconds of all repeats."""
    variants: list[Variant] = []
    for _ in range(arguments.repeats):
        earlier = [(variant.seconds, variant.cpu_seconds, variant.phases) for variant in variants]
        variants = []
        gc.collect()  # one building is in memory at a time; a hook may refer back to its wrapper
        variants = build()
        _time(variants, arguments.rounds, arguments.warm_up, group)
        _put_before(variants, earlier)
    return variants


def _put_before(
    variants: list[Variant], earlier: Sequence[tuple[list[float], list[float], list[Mapping[str, float]]]]
) -> None:
    for variant, (seconds, cpu_seconds, phases) in zip(variants, earlier, strict=False):
        variant.seconds[:0], variant.cpu_seconds[:0], variant.phases[:0] = seconds, cpu_seconds, phases


def _time(variants: list[Variant], rounds: int, warm_up: int, group: dist.ProcessGroup | None) -> None:
    for round_number in range(-warm_up, rounds):
        shift = round_number % len(variants)
        for variant in variants[shift:] + variants[:shift]:
            variant.prepare()
            dist.barrier(group)
            start, cpu_start = time.perf_counter(), time.process_time()
            returned = variant.run()
            elapsed, cpu_elapsed = time.perf_counter() - start, time.process_time() - cpu_start
            if round_number >= 0:
                variant.seconds.append(elapsed)
                variant.cpu_seconds.append(cpu_elapsed)
                if isinstance(returned, SyncRecord):
                    variant.phases.append(returned.seconds)


def round_ratios(variant: Variant, reference: Variant) -> list[float]:
    """One ratio of times per round, ascending."""
    return _ratios(variant.seconds, reference.seconds)


def _ratios(own_seconds: Sequence[float], other_seconds: Sequence[float]) -> list[float]:
    return sorted(own / other for own, other in zip(own_seconds, other_seconds, strict=True))


def summarize(variants: list[Variant]) -> Summary:
    """Medians, and ratios to the first variant, measured on this rank."""
    summary: Summary = {}
    for variant in variants:
        ratios = round_ratios(variant, variants[0])
        summary[variant.name] = {
            "n": len(ratios),
            "median_ms": 1e3 * statistics.median(variant.seconds),
            "p90_ms": 1e3 * statistics.quantiles(variant.seconds, n=10)[-1],
            **_cpu(variant, variants[0]),
            **({"phase_ms": _phase_medians_ms(variant.phases)} if variant.phases else {}),
            "median_ratio": statistics.median(ratios),
            "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        }
    return summary


def _cpu(variant: Variant, reference: Variant) -> dict[str, float]:
    if not variant.cpu_seconds:
        return {}
    ratios = _ratios(variant.cpu_seconds, reference.cpu_seconds)
    return {"cpu_ms": 1e3 * statistics.median(variant.cpu_seconds), "cpu_ratio": statistics.median(ratios)}


def _phase_medians_ms(phases: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for seconds in phases for name in seconds)  # in the order in which they came
    return {name: 1e3 * statistics.median(seconds.get(name, 0.0) for seconds in phases) for name in names}


def median_ratio(variants: list[Variant], own: str, other: str) -> float:
    """Median over the rounds of the time of ``own`` divided by the time of ``other`` in the same round."""
    named = {variant.name: variant for variant in variants}
    return statistics.median(round_ratios(named[own], named[other]))


def verdicts(ratios: Mapping[str, float], aims: Mapping[str, float]) -> dict[str, str]:
    """The verdict on each aim, from the ratio of the same name."""
    return {what: "met" if ratios[what] <= aim else "missed" for what, aim in aims.items()}


def print_table(title: str, summary: Summary) -> None:
    """One line per variant."""
    print(f"\n{title}\n{'':41}{'median':>11}{'p90':>11}{'ratio':>9}")
    for name, row in summary.items():
        times = f"{row['median_ms']:9.2f}ms{row['p90_ms']:9.2f}ms"
        print(f"{name:41}{times}{row['median_ratio']:9.3f}", flush=True)


def print_phases(summary: Summary) -> None:
    """One line per variant with phases; medians of phases do not add up to the median of the whole."""
    rows = {name: row["phase_ms"] for name, row in summary.items() if "phase_ms" in row}
    phases = dict.fromkeys(phase for row in rows.values() for phase in row)
    widths = {phase: max(6, len(phase) + 1) for phase in phases}  # a line of six phases fits the screen
    if rows:
        print(f"{'phases, ms':40}" + "".join(f"{phase:>{width}}" for phase, width in widths.items()))
    for name, row in rows.items():
        values = {phase: row.get(phase, 0.0) for phase in phases}
        texts = {phase: f"{value:.{2 if value < 99 else 0}f}" for phase, value in values.items()}
        print(f"{name:40}" + "".join(f"{texts[phase]:>{width}}" for phase, width in widths.items()), flush=True)


def print_aims(ratios: Mapping[str, float], aims: Mapping[str, float]) -> None:
    """One line per ratio, with its aim if there is an aim."""
    told = verdicts(ratios, aims)
    for what, ratio in ratios.items():
        print(
            f"{what:41}{ratio:19.3f}" + (f"   aim {aims[what]:.2f}: {told[what]}" if what in aims else ""), flush=True
        )


def write_results(arguments: argparse.Namespace, results: dict[str, Any]) -> None:
    """Write results, arguments and machine to the path of ``--json``, on rank 0."""
    if dist.get_rank() == 0:
        group = {
            "world_size": dist.get_world_size(),
            "backend": dist.get_backend(),
            "threads_per_rank": torch.get_num_threads(),
        }
        save(arguments, {**machine(), **group}, results)


def save(arguments: argparse.Namespace, environment: dict[str, Any], results: dict[str, Any]) -> None:
    """Write results to the path of ``--json``, if given."""
    if arguments.json:
        settings = {name: value for name, value in vars(arguments).items() if name != "json"}
        document = {"environment": environment, "arguments": settings, "results": results}
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


def machine() -> dict[str, Any]:
    """Versions, hardware, load and commit."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average_at_end": os.getloadavg(),
        "commit": commit(),
    }
