"""Growth of the call with ranks: measured up to the available ranks, modelled up to 1,024 over gloo."""

import argparse
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from _alpha_beta import Headers, Ours, Ring, Times, fit_ours, fit_ring, residuals
from _calls import BARE, LEVELS, Calls
from _fit import typical_and_worst
from _measure import Summary, measure, print_aims, summarize, verdicts
from _scaling import seconds_per_message, seconds_per_row
from bench_agree import CHILDREN, hub_seconds, reading_seconds

FEW_TENSORS, MANY_TENSORS = 4, 1000
SMALL_CALL_AIMS = {"2 ranks, 64 KiB": 1.5, "4 ranks, 64 KiB": 0.5, "8 ranks, 64 KiB": 0.3}  # off / bare all_reduce
REASONED_RANKS = (2, 4, 8, 16, 64, 256, 1024)


def answer_ranks(arguments: argparse.Namespace, sizes_bytes: Sequence[int]) -> dict[str, Any]:
    """Collective: measure in ever larger groups; rank 0 prints, models and returns all results."""
    sizes = [2**power for power in range(1, dist.get_world_size().bit_length())]
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    run = {
        (size, size_bytes): _run_in(group, _calls(size_bytes, FEW_TENSORS, group), arguments)
        for size, group in groups.items()
        for size_bytes in sizes_bytes
    }
    many = _run_in(groups[2], _calls(min(sizes_bytes), MANY_TENSORS, groups[2]), arguments)
    headers = _headers(arguments) if dist.get_rank() == 0 else None
    dist.barrier()  # the others wait, instead of disturbing by leaving
    if headers is None:
        return {}
    _print_runs(run)
    tensor_seconds = seconds_per_tensor(run[2, min(sizes_bytes)], many)
    reasoned = _reason(run, tensor_seconds, headers, arguments)
    _print_ours(reasoned["ours"])
    for network in reasoned["networks"]:
        _print_network(network, arguments)
    tables = {_run_name(*key): summary for key, summary in run.items()}
    aims = {name: aim for name, aim in SMALL_CALL_AIMS.items() if name in tables}
    ratios = {name: tables[name][_variant("off", on_host=True)]["median_ratio"] for name in aims}
    print_aims(ratios, aims)
    return {
        "run": tables,
        "aims": aims,
        "verdicts": verdicts(ratios, aims),
        f"run, {MANY_TENSORS:,} tensors": many,
        "reasoned": reasoned,
    }


def _calls(size_bytes: int, count: int, group: dist.ProcessGroup) -> Calls:
    return Calls(size_bytes, count, group, states=["to pack"], with_gloo=True)


def _run_in(group: dist.ProcessGroup, calls: Calls, arguments: argparse.Namespace) -> Summary:
    """Collective over the world: the ranks of the group measure, the remaining ranks wait without using a core."""
    summary: Summary = {}
    if dist.get_rank(group) >= 0:
        summary = summarize(measure(calls.build, arguments, group))
    dist.barrier()
    return summary


def seconds_per_tensor(few: Summary, many: Summary) -> float:
    """Time per additional tensor, from calls with equal bytes; 0 if noise makes it negative."""
    extra = [table[_variant("off")]["median_ms"] - table[BARE]["median_ms"] for table in (few, many)]
    return max(0.0, extra[1] - extra[0]) / 1e3 / (MANY_TENSORS - FEW_TENSORS)


def _headers(arguments: argparse.Namespace) -> Headers:
    """The costs of headers, measured on this rank alone."""
    message_seconds = seconds_per_message({ranks: hub_seconds(ranks) for ranks in CHILDREN})
    row_seconds = seconds_per_row({size: reading_seconds(size) for size in REASONED_RANKS})
    return Headers(message_seconds, row_seconds, arguments.ranks_per_host)


def _variant(level: str, *, on_host: bool = False) -> str:
    return f"ours, {level}, to pack" if on_host else f"ours, {level}, gloo, to pack"


def _reason(
    run: Mapping[tuple[int, int], Summary], tensor_seconds: float, headers: Headers, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The model of the explicit call is fitted to 2 ranks, the least disturbed by missing cores."""
    bare = _median_seconds(run, BARE)
    two = {key: seconds for key, seconds in bare.items() if key[0] == 2}
    costs = {"tensors": FEW_TENSORS, "tensor_seconds": tensor_seconds}
    ring = fit_ring("2 ranks", two)
    ours = {}
    for level in LEVELS:
        whole = {key: seconds for key, seconds in _median_seconds(run, _variant(level)).items() if key[0] == 2}
        ours[level] = fit_ours(ring, headers, two, whole, **costs)
    return {
        "headers": vars(headers),
        "ours": {level: vars(fitted) for level, fitted in ours.items()},
        "networks": [
            _reasoned(network, times, ours, headers, arguments) for network, times in _networks(bare, arguments)
        ],
    }


def _networks(bare: Times, arguments: argparse.Namespace) -> Iterable[tuple[Ring, Times]]:
    """The modelled networks, with their times; fitted networks are as crowded as the runs."""
    yield Ring("given", 0.0, arguments.alpha_us / 1e6, 1e-9 / arguments.gigabytes_per_second), {}
    roomy = {key: seconds for key, seconds in bare.items() if not crowded(key[0])}
    if roomy:
        most = max(size for size, _ in roomy)
        yield fit_ring(f"fitted to the runs of up to {most} ranks", roomy), roomy
    if len(roomy) < len(bare):
        most = max(size for size, _ in bare)
        yield fit_ring(f"fitted to all runs, up to {most} ranks; inflated by oversubscription", bare), bare


def _reasoned(
    ring: Ring, times: Times, ours: Mapping[str, Ours], headers: Headers, arguments: argparse.Namespace
) -> dict[str, Any]:
    size_bytes = round(arguments.model_mib * 2**20)
    rows = {BARE: {size: ring.seconds(size, size_bytes) for size in REASONED_RANKS}}
    for level, own in ours.items():
        rows[f"ours, {level}"] = {
            size: own.seconds(ring, headers, size, size_bytes, arguments.model_tensors) for size in REASONED_RANKS
        }
    return {
        "network": ring.name,
        "call_us": 1e6 * ring.call_seconds,
        "alpha_us": 1e6 * ring.alpha_seconds,
        "gigabytes_per_second": 1e-9 / ring.beta_seconds if ring.beta_seconds else None,
        "residuals": {_run_name(*key): missed for key, missed in residuals(ring, times).items()},
        "milliseconds": {
            name: {str(size): 1e3 * seconds for size, seconds in row.items()} for name, row in rows.items()
        },
    }


def _median_seconds(run: Mapping[tuple[int, int], Summary], name: str) -> dict[tuple[int, int], float]:
    return {key: summary[name]["median_ms"] / 1e3 for key, summary in run.items()}


def _run_name(size: int, size_bytes: int) -> str:
    return f"{size} ranks, {size_bytes // 1024} KiB"


def _print_runs(run: Mapping[tuple[int, int], Summary]) -> None:
    rounds = next(iter(run.values()))[BARE]["n"]
    names = [_variant(level, on_host=on_host) for on_host in (True, False) for level in LEVELS]
    print(f"\nranks, run: ms, medians of {rounds} rounds; * more ranks than cores, an upper bound")
    print(f"{'ranks':>6}{'KiB':>7}{'bare':>9}{'off':>9}{'info':>9}{'by bare':>8}{'off, gloo':>11}{'info, gloo':>11}")
    for (size, size_bytes), summary in run.items():
        times = [f"{summary[name]['median_ms']:.2f}" for name in (BARE, *names)]
        ratio = summary[names[0]]["median_ratio"]
        first, last = "".join(f"{time:>9}" for time in times[:3]), "".join(f"{time:>11}" for time in times[3:])
        print(f"{size:5}{'*' if crowded(size) else ' '}{size_bytes // 1024:7}{first}{ratio:8.2f}{last}")


def _print_ours(ours: Mapping[str, Mapping[str, float]]) -> None:
    print("\nwhat ours adds to an all_reduce and the exchange of headers, fitted to 2 ranks")
    print(f"{'':6}{'us a call':>12}{'ms a GiB':>12}{'us a tensor':>13}")
    for level, own in ours.items():
        call, tensor = (1e6 * own[f"{name}_seconds"] for name in ("call", "tensor"))
        print(f"{level:6}{call:12.0f}{1e3 * 2**30 * own['byte_seconds']:12.0f}{tensor:13.2f}")


def _print_network(network: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    speed = network["gigabytes_per_second"]
    print(f"\nREASONED, {network['network']}:")
    costs = f"call {network['call_us']:.0f} us, alpha {network['alpha_us']:.0f} us"
    print(f"{costs}, {'endless' if speed is None else f'{speed:.2f}'} GB/s; ", end="")
    print(f"ms for {arguments.model_mib:g} MiB in {arguments.model_tensors:,} tensors")
    print(f"{'ranks':16}" + "".join(f"{size:9,}" for size in REASONED_RANKS))
    bare = network["milliseconds"][BARE]
    for name, row in network["milliseconds"].items():
        print(f"{name:16}" + "".join(f"{milliseconds:9.1f}" for milliseconds in row.values()))
        if row is not bare:
            print(f"{'  to bare':16}" + "".join(f"{row[size] / bare[size]:9.3f}" for size in row))
    if network["residuals"]:
        typical, worst = typical_and_worst(network["residuals"])
        missed = network["residuals"][worst]
        print(f"off what was run by {typical:.0%} (median), at most by {missed:+.0%} ({worst})", flush=True)


def crowded(size: int) -> bool:
    """Whether ``size`` ranks outnumber the cores, and wait for each other's time slices."""
    return size > (os.cpu_count() or 1)
