"""Cost of the explicit call on a slow network, by update-freq: two hosts with one rank each, or more.

    python benchmarks/bench_hosts.py [--ranks-per-host N] [--json FILE]

The hosts are network namespaces of this machine, joined by a link of a given rate (tests/helpers/hosts.py), so this
needs Linux, iproute2 and the right to make namespaces. For each rate one torchrun job, in which _hosts_worker.py checks
that all variants do the same step, and measures them interleaved, as bench_all_reduce.py does:

torch DDP       overlaps communication with the last backward; the reference. Once more as a control: its distance
                from 1 is noise. With bucket views. With bf16_compress_hook: 16 bits on the wire
ours            one call after backward, without overlap: checks off, checks info; checks off with transport="gloo"; and
                checks off with reduce_dtype=torch.bfloat16, to be compared with torch DDP's hook. From two ranks per
                host on, all but the third add in memory on each host, and over gloo between the hosts
local compute   the same step without synchronisation: a lower limit

Aims with one rank per host: at 2 Gbit/s and update-freq >= 8, ours <= 1.00 of torch DDP; with bfloat16 on the wire <=
0.75 of torch DDP by default. With more: at 1 Gbit/s and update-freq 1, ours <= 0.80 of torch DDP.

A rate counts Ethernet frames, each way. The speed of a send and of an all_reduce of the gradients' bytes is measured
and printed. Differences from real hosts: all ranks share the cores and the memory of this machine, so on two cores
gloo's threads slow down the computation that they overlap with, for torch DDP more than for the explicit call; a hop
takes microseconds; after a pause the data of 2 ms may leave at once, and torch DDP, with several buckets, may pause
more often.
"""

import argparse
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from _hosts_worker import ALONE, COMPARED, REFERENCE, add_workload, at_least_one
from _interrupt import quiet_interrupt
from _measure import parse, print_table, save

from tests.helpers.hosts import HostFailure, Hosts, reason_not_permitted

WORKER = Path(__file__).with_name("_hosts_worker.py")
NOTHING = 1.00  # what costs nothing takes at most this much of torch DDP's step
REACHED = 0.85  # of the rate: an all_reduce that gets less is held up by something else
LIMIT_SECONDS = 24 * 3600.0  # gloo gives up by itself, after 30 minutes


class Aims(NamedTuple):
    """Largest ratios of ``COMPARED``, at a rate in Gbit/s and for a range of update-freq."""

    rate: float
    update_freqs: range
    ratios: Mapping[str, float]

    def __str__(self) -> str:
        least, most = self.update_freqs[0], self.update_freqs[-1]
        return f"{self.rate:g} Gbit/s and update-freq {least}{'' if least == most else ' or more'}"


ONE_RANK_AIMS = Aims(2.0, range(8, sys.maxsize), {"off": 1.00, "info": 1.00, "bf16": 0.75})
MORE_RANKS_AIMS = Aims(1.0, range(1, 2), {"off": 0.80, "info": 0.80})


def main(given: Sequence[str] | None = None) -> None:
    """Measure rate after rate, print, write JSON if asked."""
    arguments = parse_arguments(given)
    if reason := reason_not_permitted():
        sys.exit(reason)
    try:
        run(arguments)
    except HostFailure as failure:
        sys.exit(str(failure))


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rates", type=_rate, nargs="+", default=[1.0, 2.0, 10.0], help="in Gbit/s (default: %(default)s)"
    )
    parser.add_argument(
        "--ranks-per-host", type=at_least_one, default=1, metavar="N", help="on each host (default: %(default)s)"
    )
    add_workload(parser)
    return parse(parser, given)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0.01 <= rate <= 100:
        raise argparse.ArgumentTypeError(f"got {text}, expected 0.01 to 100 Gbit/s")
    return rate


def run(arguments: argparse.Namespace) -> None:
    """Run all rates; results are written after each rate, as a job takes long."""
    rates: dict[str, dict[str, Any]] = {}
    wanted = ONE_RANK_AIMS if arguments.ranks_per_host == 1 else MORE_RANKS_AIMS
    for rate in arguments.rates:
        document = _measure_at(rate, arguments)
        results = document["results"]
        results["reached"] = reached(results["link"], rate)
        rates[f"{rate:g} Gbit/s"] = results
        _print_rate(f"{rate:g} Gbit/s", results)
        summary = {name: summarize_rate(results) for name, results in rates.items()}
        aims = judge_aims(rates.get(f"{wanted.rate:g} Gbit/s", {}), wanted)
        save(arguments, document["environment"], {"rates": rates, "summary": summary, "aims": aims})
    _print_summary(summary)
    _print_aims(aims, wanted, rates)


def _measure_at(rate: float, arguments: argparse.Namespace) -> Any:
    options = ["--update-freq", *map(str, arguments.update_freq), "--layers", str(arguments.layers)]
    options += ["--repeats", str(arguments.repeats), "--rounds", str(arguments.rounds)]
    options += ["--warm-up", str(arguments.warm_up)]
    with TemporaryDirectory() as folder, Hosts(2, rate_mbit=1000 * rate) as hosts:
        path = Path(folder, "worker.json")
        job = hosts.torchrun(WORKER, *options, "--json", str(path), nproc_per_node=arguments.ranks_per_host)
        job.wait(LIMIT_SECONDS)
        return json.loads(path.read_text())


def reached(link: Mapping[str, Mapping[str, float]], rate: float) -> dict[str, Any]:
    """The reached share of the rate, and whether the rate was the limit."""
    shares = {name: row["gigabits_per_second"] / rate for name, row in link.items()}
    is_reached = shares["bare all_reduce"] >= REACHED
    return {"share_of_rate": shares, "limited_by": "the rate" if is_reached else "this machine, not the rate"}


def update_freqs(results: Mapping[str, Any]) -> dict[int, Any]:
    """A rate's tables of steps, by update-freq, ascending."""
    prefix = "step, update-freq "
    found = {int(name.removeprefix(prefix)): table for name, table in results.items() if name.startswith(prefix)}
    return dict(sorted(found.items()))


def summarize_rate(results: Mapping[str, Any]) -> dict[str, Any]:
    """The least update-freq with a ratio of at most 1.00 from there on: by medians, and beyond noise."""
    steps = update_freqs(results)
    summary = {}
    for what, (own, reference) in COMPARED.items():
        medians = {update_freq: table["compared"][what]["median_ratio"] for update_freq, table in steps.items()}
        verdicts = {update_freq: judge(table["compared"], what, NOTHING) for update_freq, table in steps.items()}
        summary[what] = {
            "of": f"{own} / {reference}",
            "median_ratios": {str(update_freq): ratio for update_freq, ratio in medians.items()},
            "from_update_freq": first_from({update_freq: ratio <= NOTHING for update_freq, ratio in medians.items()}),
            "from_update_freq_surely": first_from({key: said == "met" for key, said in verdicts.items()}),
        }
    return summary


def first_from(holds: Mapping[int, bool]) -> int | None:
    """The least key with a true value for this and all greater keys; None without such a key."""
    found = None
    for key in sorted(holds, reverse=True):
        if not holds[key]:
            break
        found = key
    return found


def judge_aims(results: Mapping[str, Any], aims: Aims) -> dict[str, dict[str, Any]]:
    """The verdicts on the aims, by update-freq."""
    judged = {}
    for update_freq, table in update_freqs(results).items():
        if update_freq in aims.update_freqs:
            compared = table["compared"]
            judged[f"update-freq {update_freq}"] = {
                what: {**compared[what], "aim": aim, "verdict": judge(compared, what, aim)}
                for what, aim in aims.ratios.items()
            }
    return judged


def judge(compared: Mapping[str, Mapping[str, Any]], what: str, aim: float) -> str:
    """The verdict on one comparison, beside the control of the same rounds."""
    return verdict(compared[what]["ratio_interval"], compared["control"]["ratio_interval"], aim)


def verdict(interval: Sequence[float], control: Sequence[float], aim: float) -> str:
    """The verdict on a ratio: met if the whole interval of 95 % is within the aim.

    If the interval of the control excludes 1, the noise is larger than the intervals: the aim is then moved by the
    distance, against the claim.
    """
    if interval[1] <= aim * min(1.0, control[1]):
        return "met"
    return "missed" if interval[0] > aim * max(1.0, control[0]) else "not decided"


def _print_rate(name: str, results: Mapping[str, Any]) -> None:
    print(f"\n{name}, nominal; limited by {results['reached']['limited_by']}; the gradients' bytes:")
    for what, row in results["link"].items():
        share = results["reached"]["share_of_rate"][what]
        print(f"{what:41}{row['median_ms']:7.1f}ms{row['gigabits_per_second']:9.2f} Gbit/s{share:7.0%}")
    for update_freq, table in update_freqs(results).items():
        print_table(f"step at {name}, update-freq {update_freq}", table["variants"])


def _print_summary(summary: Mapping[str, Mapping[str, Any]]) -> None:
    columns = next(iter(next(iter(summary.values())).values()))["median_ratios"]
    print(f"\nmedian ratios; the update-freq from which on they are <= {NOTHING:.2f}, and surely (95 %)")
    print(f"{'update-freq':>28}{_cells(columns)}{'from':>8}{'surely':>8}")
    for name, rows in summary.items():
        for what, row in rows.items():
            ratios = _cells(f"{ratio:.2f}" for ratio in row["median_ratios"].values())
            first, surely = row["from_update_freq"] or "never", row["from_update_freq_surely"] or "never"
            print(f"{name:12}{what:16}{ratios}{first:>8}{surely:>8}")
            name = ""
    for what, (own, reference) in COMPARED.items():
        print(f"{what}: {own} / {reference}")


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"{text:>7}" for text in texts)


def _print_aims(aims: Mapping[str, Mapping[str, Any]], wanted: Aims, rates: Mapping[str, Mapping[str, Any]]) -> None:
    name = f"{wanted.rate:g} Gbit/s"
    if not aims:
        print(f"\nno aims to judge: they are for {wanted}")
        return
    print(f"\naims at {name}, limited by {rates[name]['reached']['limited_by']}")
    for update_freq, judged in aims.items():
        for what, row in judged.items():
            low, high = row["ratio_interval"]
            told = f"{row['median_ratio']:6.3f} ({low:.3f} to {high:.3f})"
            print(f"{update_freq:16}{what:12}{told}   aim {row['aim']:.2f}: {row['verdict']}")
        alone = rates[name][f"step, {update_freq}"]["variants"][ALONE]["median_ratio"]
        print(f"{'':16}{ALONE}: {alone:.3f} of {REFERENCE}; nothing gets below", flush=True)


if __name__ == "__main__":
    with quiet_interrupt():
        main()
