"""Run of all benchmarks, one after the other: short, as a test, or in full, as for the kept results.

    python benchmarks/run_all.py                        # a few minutes
    python benchmarks/run_all.py --full                 # about an hour; writes benchmarks/results/
    python benchmarks/run_all.py --full --only step_2   # one benchmark

Use an idle machine: ratios are taken within a round, but a loaded machine changes them, too. A benchmark
that cannot run here (no CUDA device, no right to make network namespaces, or only useful in full) is left out with a
message. After a failure the remaining benchmarks still run; the failure is the exit status.
"""

import argparse
import shlex
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from _checkout import ROOT, environment
from _interrupt import quiet_interrupt

RESULTS = ROOT / "benchmarks" / "results"
CLEAN_UP_SECONDS = 15.0  # after Ctrl-C; network namespaces take about 5


@dataclass(frozen=True)
class Run:
    """One start of a script: on ``ranks`` ranks; 0 for a script that starts its own ranks.

    ``short`` is None for a script with a full form only; ``why_not`` returns the reason why the script cannot run here.
    ``short_ranks``: of the short form, None for as many ranks.
    """

    script: str
    ranks: int
    full: str
    short: str | None = None
    why_not: Callable[[], str] = lambda: ""
    short_ranks: int | None = None


def _no_hosts() -> str:
    from tests.helpers.hosts import reason_not_permitted

    return reason_not_permitted() or ""


def _no_device() -> str:
    return "" if torch.cuda.is_available() else "no CUDA device is available"


_LITTLE = "--repeats 1 --rounds 4 --warm-up 1"
_MORE = "--repeats 2 --rounds 5 --warm-up 1"
RUNS = {
    "step_2": Run(
        "bench_step.py",
        2,
        "--models transformer --update-freq 1 4 --repeats 3",
        f"--models transformer --update-freq 4 --set-to-none yes {_LITTLE}",
    ),
    "step_16_times_2": Run(
        "bench_step.py", 2, "--models transformer --update-freq 16 --set-to-none yes --repeats 2 --rounds 3"
    ),
    "step_others_2": Run(
        "bench_step.py",
        2,
        '--models tiny embedding "sparse embedding" --update-freq 1 --repeats 2 --rounds 4 --warm-up 1',
        f"--models resnet tiny --update-freq 1 --set-to-none yes {_LITTLE}",
    ),
    "step_resnet_2": Run("bench_step.py", 2, "--models resnet --update-freq 1 --repeats 5 --rounds 12"),
    "step_small_2": Run("bench_step.py", 2, "--models small --update-freq 1 --repeats 5 --rounds 60 --warm-up 5"),
    "step_4": Run(
        "bench_step.py", 4, "--models transformer --update-freq 1 4 --set-to-none yes --repeats 2 --rounds 6"
    ),
    "all_reduce_2": Run("bench_all_reduce.py", 2, "--repeats 5", "--repeats 2 --rounds 5"),
    "all_reduce_4": Run("bench_all_reduce.py", 4, "--repeats 3"),
    "memory": Run("bench_memory.py", 0, "--repeats 2", '--models transformer --variants "torch DDP" ours --repeats 2'),
    "hosts": Run(
        "bench_hosts.py",
        0,
        "--repeats 2 --rounds 3 --warm-up 1",
        "--rates 2 --update-freq 1 8 --repeats 1 --rounds 3 --warm-up 1",
        _no_hosts,
    ),
    "hosts_of_2": Run(
        "bench_hosts.py",
        0,
        "--ranks-per-host 2 --rates 1 --update-freq 1 4 --repeats 2 --rounds 6 --warm-up 1",
        why_not=_no_hosts,
    ),
    "warm_call": Run("bench_warm_call.py", 0, "", "--repeats 1 --rounds 2 --steps 5 --warm-up 5"),
    "scale_tensors": Run("bench_scale.py", 2, f"tensors {_MORE}", f"tensors --counts 100 1000 {_LITTLE}"),
    "scale_replan": Run(
        "bench_scale.py", 2, f"replan --counts 1000 16000 100000 {_MORE}", f"replan --counts 100 1000 {_LITTLE}"
    ),
    "scale_bytes": Run("bench_scale.py", 2, f"bytes {_MORE}", f"bytes --largest-mib 64 {_LITTLE}"),
    "scale_ranks": Run("bench_scale.py", 16, f"ranks {_MORE}", f"ranks --largest-mib 1 {_LITTLE}"),
    "scale_control": Run("bench_scale.py", 16, "control", "control --simulated 1024"),
    "reproducible_2": Run("bench_reproducible.py", 2, "--repeats 4 --rounds 6", f"--update-freq 4 {_LITTLE}"),
    "reproducible_4": Run("bench_reproducible.py", 4, "--repeats 3 --rounds 5"),
    "wire": Run("bench_wire.py", 0, '--wires "their own" bfloat16'),
    "agree_step_2": Run("bench_agree.py", 2, "step --repeats 10"),
    "agree_step_4": Run("bench_agree.py", 4, "step --repeats 10 --update-freq 1 4"),
    "agree_header_64": Run("bench_agree.py", 64, "header --hosts 8", f"header --hosts 4 {_LITTLE}", short_ranks=8),
    "debug_step_2": Run("bench_debug.py", 2, "step"),
    "debug_digest": Run("bench_debug.py", 1, "digest"),
    "digest_2": Run("bench_digest.py", 2, "--rounds 60", f"--layers 2 {_LITTLE}"),
    "trace": Run("bench_trace.py", 0, ""),
    "operations": Run("bench_operations.py", 1, "", _LITTLE),
    "watch": Run("bench_watch.py", 0, "--rounds 40", "--repeats 1 --rounds 2"),
    "torch_ddp_faults": Run("torch_ddp_faults.py", 0, "", "--only weights nan"),
    "gpu_nccl_1": Run("bench_gpu.py", 1, "", f"--models transformer {_LITTLE}", _no_device),
    "gpu_nccl_2": Run("bench_gpu.py", 2, "", None, _no_device),
}


def main(given: Sequence[str] | None = None) -> None:
    """Run the benchmarks, print the outcome of each."""
    arguments = parse_arguments(given)
    reasons = {name: why_left_out(name, full=arguments.full) for name in arguments.only}
    print(f"{sum(not reason for reason in reasons.values())} of {len(reasons)} benchmarks will run", flush=True)
    failed = []
    for name, reason in reasons.items():
        if reason:
            print(f"--- {name}: left out, {reason}", flush=True)
            continue
        print(f"--- {name}", flush=True)
        start = time.monotonic()
        exit_code = run_one(command(name, full=arguments.full))
        print(f"--- {name}: {time.monotonic() - start:.0f} s, exit code {exit_code}", flush=True)
        failed += [name] if exit_code else []
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="as the kept results were made; writes them")
    parser.add_argument("--only", nargs="+", default=list(RUNS), metavar="NAME", help="of them all")
    arguments = parser.parse_args(given)
    for name in arguments.only:
        if name not in RUNS:
            problem = f"no benchmark is called {name!r}, expected one of {', '.join(RUNS)}"
            parser.exit(2, textwrap.fill(problem, 80) + "\n")
    return arguments


def why_left_out(name: str, *, full: bool) -> str:
    """The reason why a script does not run; empty for a script that runs."""
    if not full and RUNS[name].short is None:
        return f"only in full (make bench-full BENCH={name})"
    return RUNS[name].why_not()


def command(name: str, *, full: bool) -> list[str]:
    """The command line of a script."""
    run = RUNS[name]
    ranks = run.ranks if full or run.short_ranks is None else run.short_ranks
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks else []
    options = shlex.split(run.full if full else run.short or "")
    kept = ["--json", str(RESULTS / f"{name}.json")] if full else []
    return [sys.executable, *launch, str(ROOT / "benchmarks" / run.script), *options, *kept]


def run_one(words: Sequence[str]) -> int:
    """The exit code of a command. The command gets Ctrl-C, too, and time to clean up before a kill."""
    process = subprocess.Popen(words, env=environment())
    try:
        return process.wait()
    except KeyboardInterrupt:
        with suppress(subprocess.TimeoutExpired):
            process.wait(CLEAN_UP_SECONDS)
        raise
    finally:
        process.kill()  # nothing happens if it has ended
        process.wait()


if __name__ == "__main__":
    with quiet_interrupt():
        main()
