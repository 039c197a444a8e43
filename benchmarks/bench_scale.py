"""Growth of the call with tensors, bytes and ranks.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_scale.py tensors [--json FILE]
    torchrun --standalone --nproc-per-node 2 benchmarks/bench_scale.py replan [--json FILE]
    torchrun --standalone --nproc-per-node 2 benchmarks/bench_scale.py bytes [--json FILE]
    torchrun --standalone --nproc-per-node 16 benchmarks/bench_scale.py ranks [--json FILE]
    torchrun --standalone --nproc-per-node 16 benchmarks/bench_scale.py control [--json FILE]

Measured like bench_all_reduce.py: variants interleaved round by round, ratios taken within a round. A call is
all_reduce() alone, after a barrier of the ranks, with synthetic gradients: in the views of the last call ("views", as
after zero_grad(set_to_none=False)), or in separate tensors ("to pack", as after zero_grad()). The bare all_reduce of a
tensor of the same bytes neither divides, packs nor agrees.

tensors   100 to 100,000 tensors with the same total bytes, so that only the work per tensor grows; with the seconds of
          every phase (agree and payload include waiting for the other rank). Also a whole step with as many tensors:
          zero_grad, forward and backward with little computation, synchronisation, SGD; torch DDP packs in hooks during
          backward, so only steps are compared with torch DDP. Its construction and its second step grow with the square
          of the tensors, 100 s and more for 100,000: it is left out there (--ddp-up-to)
replan    as many tensors: the call after a parameter was frozen or thawed, which plans the layout again
bytes     1 MiB to 1 GiB, in 4 tensors. The largest size needs 6 times its bytes on each rank
ranks     the first 2, 4, 8, ... of the available ranks, with 64 KiB to 16 MiB, by default (ranks of one host share
          memory) and with transport="gloo"; aims for 64 KiB, off by the bare all_reduce: <= 1.5, 0.5 and 0.3 at 2, 4
          and 8 ranks. Then modelled times for up to 1,024 ranks over gloo, not measured, by the model of
          _alpha_beta.py: in your network (--alpha-us, --gigabytes-per-second), and in networks fitted to these runs.
          The error of the model is printed
control   what the library adds to a process beside torch DDP, in groups of the first 2, 4, 8, ... ranks: descriptors,
          threads, private memory, and operations on the store, once, not in rounds. Then on one rank, among 1,024 and
          8,192 simulated ranks: reading equal rows, a LayoutError of two inventories of 2,000 tensors, and the poll and
          the text of a report about a missing rank. Aims: at 16 ranks 36 descriptors in a process, on the median rank
          none more than at 8 ranks, and as many store operations; 1,024 rows in 0.1 ms; a LayoutError of 1 MB

Ranks that outnumber the cores wait for each other's time slices: such figures are upper bounds, and marked.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from _calls import BARE, COPIES, Calls
from _control_plane import answer_control
from _interrupt import quiet_interrupt
from _measure import Summary, Variant, measure, parse, print_table, process_group, summarize, write_results
from _rank_growth import FEW_TENSORS, answer_ranks, crowded
from _replanning import answer_replan
from _workloads import WRAPPERS, TinyTensors, mean_square, step
from torch import nn

MIB = 2**20
TENSORS_BYTES = 8 * MIB
RANKS_BYTES = (2**16, MIB, 4 * MIB, 16 * MIB)
FIRST_STEPS = 2  # torch DDP lays out its buckets anew in the second one
ALONE = "local compute alone"
STEPS: Mapping[str, Callable[[nn.Module], nn.Module]] = MappingProxyType(
    {name: WRAPPERS[name] for name in ("torch DDP", "torch DDP, bucket views", "ours, off", "ours, info")}
    | {ALONE: lambda module: module}
)


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print on rank 0, write JSON if asked."""
    arguments = parse_arguments(given)
    with process_group():
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Collective: run the measurement of the subcommand."""
    if dist.get_world_size() == 1:
        sys.exit("nothing to reduce: got 1 rank, expected 2 or more; raise --nproc-per-node")
    answers = {
        "tensors": _answer_tensors,
        "replan": partial(answer_replan, size_bytes=TENSORS_BYTES),
        "bytes": _answer_bytes,
        "ranks": partial(answer_ranks, sizes_bytes=_sizes(arguments)),
        "control": answer_control,
    }
    if arguments.question in ("tensors", "replan", "bytes") and crowded(dist.get_world_size()):
        _say(f"{dist.get_world_size()} ranks on {os.cpu_count()} cores: oversubscribed, read times as upper bounds")
    write_results(arguments, answers[arguments.question](arguments))


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=("tensors", "replan", "bytes", "ranks", "control"))
    group = parser.add_argument_group("tensors and replan")
    counts = [100, 1000, 10_000, 100_000]
    group.add_argument("--counts", type=int, nargs="+", default=counts, help="of tensors (default: %(default)s)")
    group.add_argument(
        "--ddp-up-to", type=int, default=10_000, help="leave torch DDP out above as many tensors (default: %(default)s)"
    )
    group = parser.add_argument_group("bytes and ranks")
    group.add_argument("--largest-mib", type=float, help="leave out larger sizes (default: 1024, and for ranks 16)")
    group = parser.add_argument_group("ranks, the part that is not run")
    group.add_argument("--alpha-us", type=float, default=50.0, help="of a hop in your network (default: %(default)s)")
    group.add_argument("--gigabytes-per-second", type=float, default=1.0, help="between ranks (default: %(default)s)")
    group.add_argument("--ranks-per-host", type=int, default=8, help="default: %(default)s")
    group.add_argument("--model-mib", type=float, default=34.0, help="gradients of your model (default: %(default)s)")
    group.add_argument("--model-tensors", type=int, default=123, help="that they are in (default: %(default)s)")
    group = parser.add_argument_group("control")
    group.add_argument("--simulated", type=int, nargs="+", default=[1024, 8192], help="ranks (default: %(default)s)")
    arguments = parse(parser, given)
    for problem in _problems(arguments):
        parser.error(problem)
    return arguments


def _problems(arguments: argparse.Namespace) -> Iterable[str]:
    for count in arguments.counts:
        if not 1 <= count <= TENSORS_BYTES // 4:
            yield f"--counts is out of range: got {count}, expected 1 to {TENSORS_BYTES // 4:,}, an element each"
    for name in ("alpha_us", "gigabytes_per_second", "ranks_per_host", "model_mib", "model_tensors"):
        if not getattr(arguments, name) > 0:
            yield f"--{name.replace('_', '-')} is out of range: got {getattr(arguments, name):g}, expected more than 0"
    if not _sizes(arguments):
        yield f"--largest-mib leaves nothing to measure: got {arguments.largest_mib:g}, expected 1 or more"
    needed = COPIES * max(_sizes(arguments), default=0) / 2**30 * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    if needed > memory:
        yield f"the ranks would need {needed:.0f} GiB, and this machine has {memory:.0f}; lower --largest-mib"


def _sizes(arguments: argparse.Namespace) -> list[int]:
    """Total bytes of the measured calls."""
    if arguments.question in ("tensors", "replan", "control"):
        return [TENSORS_BYTES]
    sizes = RANKS_BYTES if arguments.question == "ranks" else [MIB << power for power in range(0, 11, 2)]
    return [size for size in sizes if arguments.largest_mib is None or size <= arguments.largest_mib * MIB]


def _say(*lines: str) -> None:
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)


def _answer_tensors(arguments: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for count in arguments.counts:
        calls = Calls(TENSORS_BYTES, count)
        call = summarize(measure(calls.build, arguments))
        _add_microseconds_per_tensor(call, BARE, count)
        set_up: dict[str, float] = {}
        names = [name for name in STEPS if count <= arguments.ddp_up_to or not name.startswith("torch")]
        whole = summarize(measure(partial(_steps, names, count, set_up), arguments))
        _add_microseconds_per_tensor(whole, ALONE, count)
        for name, seconds in set_up.items():
            whole[name]["set_up_s"] = seconds
        phases = calls.median_phases(arguments)
        results[f"{count} tensors"] = {"call": call, "phases_ms": phases, "step": whole}
        if dist.get_rank() == 0:
            print_table(f"call, {count:,} tensors, {TENSORS_BYTES // MIB} MiB in all", call)
            _print_phases(phases)
            print_table(f"step, {count:,} tensors", whole)
    _print_growth(results)
    return results


def _add_microseconds_per_tensor(summary: Summary, without: str, count: int) -> None:
    """Add to each row its median minus the median of ``without``, per tensor."""
    for row in summary.values():
        row["us_per_tensor"] = 1e3 * (row["median_ms"] - summary[without]["median_ms"]) / count


def _steps(names: Sequence[str], count: int, set_up: dict[str, float]) -> list[Variant]:
    """The variants, the reference first; ``set_up`` gets the seconds of preparation of each variant."""
    batches = [torch.randn(1)]
    variants = []
    for name in names:
        module = TinyTensors(count, TENSORS_BYTES // 4 // count)
        start = time.perf_counter()
        model = STEPS[name](module)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        timed = partial(step, model, optimizer, mean_square, batches, set_to_none=True)
        for _ in range(FIRST_STEPS):
            timed()
        set_up[name] = time.perf_counter() - start
        variants.append(Variant(name, timed))
    return variants


def _print_phases(phases: Mapping[str, Mapping[str, float]]) -> None:
    names = dict.fromkeys(name for row in phases.values() for name in row)
    print(f"{'phases in ms, medians on rank 0':32}" + "".join(f"{name:>8}" for name in names))
    for variant, row in phases.items():
        print(f"{variant:32}" + "".join(f"{row.get(name, 0.0):8.2f}" for name in names), flush=True)


def _print_growth(results: Mapping[str, Any]) -> None:
    counts = "".join(f"{name.removesuffix(' tensors'):>9}" for name in results)
    _say("\nus per tensor: calls beyond a bare all_reduce, steps beyond local compute alone")
    _say(f"{'tensors':32}{counts}")
    rows = [("call", name, "us_per_tensor") for name in next(iter(results.values()))["call"]]
    for table, name, what in [*rows, *(("step", name, "us_per_tensor") for name in STEPS)]:
        _say(f"{f'{table}: {name}':32}" + _row(results, table, name, what))
    _say("\nseconds to wrap the model and to take its first two steps", f"{'tensors':32}{counts}")
    for name in STEPS:
        _say(f"{name:32}" + _row(results, "step", name, "set_up_s"))


def _row(results: Mapping[str, Any], table: str, name: str, what: str) -> str:
    """A cell for each number of tensors; a dash where the variant was left out."""
    rows = [result[table].get(name) for result in results.values()]
    return "".join(f"{'-':>9}" if row is None else f"{row[what]:9.2f}" for row in rows)


def _answer_bytes(arguments: argparse.Namespace) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for size_bytes in _sizes(arguments):
        calls = Calls(size_bytes, FEW_TENSORS)
        summary = summarize(measure(calls.build, arguments))
        phases = calls.median_phases(arguments)
        name = f"{size_bytes // MIB} MiB"
        results[name] = {"call": summary, "phases_ms": phases}
        if dist.get_rank() == 0:
            print_table(f"call, {name} in {FEW_TENSORS} tensors, {dist.get_world_size()} ranks", summary)
            _print_phases(phases)
    return results


if __name__ == "__main__":
    with quiet_interrupt():
        main()
