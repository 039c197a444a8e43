"""Cost of agreement: in a training step, and of the header exchange alone by number of ranks.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_agree.py step [--json FILE]
    torchrun --standalone --nproc-per-node 16 benchmarks/bench_agree.py header [--hosts 4] [--json FILE]

Measured like bench_all_reduce.py: variants interleaved round by round, ratios taken within a round. Two questions:

step     a whole training step with checks="info" against "off", and "off" a second time as a control: the distance of
         the control from 1 is noise. Aims: info/off <= 1.05 at update-freq 1, <= 1.03 from 4 on. "off" agrees, too;
         its time is printed as well: for each step, phase agree of the last rank to arrive, which does not wait
header   the exchange of 128 bytes per rank, in groups of 2, 4, 8, ... ranks: over the tree of the library, and as a
         gloo all_gather of the same bytes, against a barrier of the same ranks. With --hosts the ranks claim to run on
         as many hosts, so that the hubs of the tree use TCP, on this machine. Then the modelled time of a ring for up
         to 4,096 ranks, which is not measured

Ranks that outnumber the cores wait for each other's time slices: such figures are upper bounds, and marked.
"""

import argparse
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _interrupt import quiet_interrupt
from _measure import (
    Variant,
    measure,
    parse,
    print_table,
    process_group,
    round_ratios,
    summarize,
    write_results,
)
from _scaling import (
    ROW_BYTES,
    Network,
    doubling_hops,
    fit_alpha,
    limits,
    ring_hops,
    seconds_per_row,
)
from _workloads import LAYERS, Transformer, predict_tokens, step, tokens

from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp._agreement.agree import agree
from legacy_ddp._agreement.header import Header, encode_header
from legacy_ddp._collectives.state import Synchronizer
from legacy_ddp._settings import Settings
from legacy_ddp._transport import first_meeting
from legacy_ddp._transport.call import Call, GroupState
from legacy_ddp._transport.private_groups import Groups
from legacy_ddp._transport.rows import Operation

STEP_AIMS = {1: 1.05, 4: 1.03}  # from this update-freq on: info/off
HEADER_AIM = 0.03  # of a step
LARGE = (64, 128, 256, 512, 1024, 2048, 4096)
READINGS = 20  # of each number of rows


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print on rank 0, write JSON if asked."""
    arguments = parse_arguments(given)
    with process_group():
        run(arguments)


def run(arguments: argparse.Namespace) -> None:
    """Collective: run the measurement of the subcommand."""
    results = {"step": _answer_step, "header": _answer_header}[arguments.question](arguments)
    write_results(arguments, results)


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=("step", "header"))
    group = parser.add_argument_group("step")
    group.add_argument("--update-freq", type=int, nargs="+", default=[1, 4, 16], help="default: %(default)s")
    group.add_argument("--layers", type=int, default=LAYERS, help="of the transformer (default: %(default)s)")
    group = parser.add_argument_group("header")
    group.add_argument("--hosts", type=int, default=1, help="that the ranks claim (default: %(default)s)")
    group = parser.add_argument_group("header, the part that is not run")
    group.add_argument("--alpha-us", type=float, default=50.0, help="of a hop in your network (default: %(default)s)")
    group.add_argument("--gigabytes-per-second", type=float, default=1.0, help="between ranks (default: %(default)s)")
    group.add_argument("--step-ms", type=float, default=300.0, help="your training step (default: %(default)s)")
    arguments = parse(parser, given)
    if arguments.hosts < 1:
        parser.error(f"--hosts is out of range: got {arguments.hosts}, expected 1 or more")
    return arguments


def _say(*lines: str) -> None:
    if dist.get_rank() == 0:
        print("\n".join(lines), flush=True)


def _crowded(size: int) -> bool:
    return size > (os.cpu_count() or 1)


def _answer_step(arguments: argparse.Namespace) -> dict[str, Any]:
    size, results = dist.get_world_size(), {}
    if _crowded(size):
        _say(f"{size} ranks on {os.cpu_count()} cores: oversubscribed, read times as upper bounds")
    for update_freq in arguments.update_freq:
        agree_seconds: dict[str, list[float]] = defaultdict(list)
        variants = measure(partial(_steps, update_freq, arguments.layers, agree_seconds), arguments)
        summary = summarize(variants)
        for variant in variants:
            row = summary[variant.name]
            row["ratio_interval"] = median_interval(round_ratios(variant, variants[0]))
            row["last_rank_agree_ms"] = 1e3 * _last_rank_seconds(agree_seconds[variant.name], arguments)
        title = f"step, update-freq {update_freq}, {size} ranks, zero_grad()"
        aim = STEP_AIMS[max(least for least in STEP_AIMS if least <= update_freq)]
        info, control = (summary[name]["ratio_interval"] for name in ("info", "off again"))
        results[title] = {"aim": aim, "verdict": verdict(info, control, aim), "variants": summary}
        if dist.get_rank() == 0:
            _print_step(title, results[title])
    return results


def _steps(update_freq: int, layers: int, agree_seconds: dict[str, list[float]]) -> list[Variant]:
    """The variants, the reference first."""
    batches = tokens(update_freq)
    variants = []
    for name, level in {"off": "off", "off again": "off", "info": "info"}.items():
        model = LegacyDistributedDataParallel(Transformer(layers), checks=level)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        timed = partial(_step, model, optimizer, batches, agree_seconds[name])
        variants.append(Variant(name, timed))
    return variants


def _step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[torch.Tensor],
    agree_seconds: list[float],
) -> None:
    record = step(model, optimizer, predict_tokens, batches, set_to_none=True)
    agree_seconds.append(record.seconds["agree"])


def _last_rank_seconds(own: list[float], arguments: argparse.Namespace) -> float:
    """Collective: the median over the timed steps of the shortest phase agree of any rank."""
    per_building = arguments.warm_up + arguments.rounds
    timed = [seconds for index, seconds in enumerate(own) if index % per_building >= arguments.warm_up]
    shortest = torch.tensor(timed, dtype=torch.float64)
    dist.all_reduce(shortest, dist.ReduceOp.MIN)
    return statistics.median(shortest.tolist())


def verdict(info: tuple[float, float], control: tuple[float, float], aim: float) -> str:
    """The verdict on info/off; noise as large as the noise of the control leaves it undecided."""
    if info[1] <= aim:
        return "met"
    return "missed" if info[0] > max(aim, control[1]) else "not decided"


def _print_step(title: str, result: dict[str, Any]) -> None:
    variants = result["variants"]
    print_table(title, variants)
    for name, what in {"off again": "control, off/off", "info": "info/off"}.items():
        low, high = variants[name]["ratio_interval"]
        aim = f"   aim {result['aim']:.2f}: {result['verdict']}" if name == "info" else ""
        print(f"{what + ', 95 % of median':41}{low:10.3f} to {high:.3f}{aim}")
    for name in ("off", "info"):
        row = variants[name]
        share = row["last_rank_agree_ms"] / row["median_ms"]
        print(f"{name + ', last rank in agree':41}{row['last_rank_agree_ms']:9.2f}ms   {share:.1%}", flush=True)


def median_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """At least 95 % for the median, from order statistics alone, if the ascending values are independent.

    Fewer than 6 values cannot reach 95 %: the interval is then from the least to the greatest value.
    """
    outside, tail = 0, 0.0
    while (tail := tail + math.comb(len(ordered), outside) / 2 ** len(ordered)) <= 0.025:
        outside += 1
    skipped = max(outside, 1) - 1
    return ordered[skipped], ordered[-1 - skipped]


def _answer_header(arguments: argparse.Namespace) -> dict[str, Any]:
    if dist.get_world_size() == 1:
        sys.exit("nothing to exchange: got 1 rank, expected 2 or more; raise --nproc-per-node")
    sizes = [2**power for power in range(1, dist.get_world_size().bit_length())]
    summaries = {size: _exchange_summary(size, arguments) for size in sizes}
    reading = {size: reading_seconds(size) for size in (*sizes, *LARGE)} if dist.get_rank() == 0 else {}
    dist.barrier()  # the others wait, instead of disturbing by leaving
    if dist.get_rank() != 0:
        return {}
    _print_exchanges(summaries)
    _print_shape(reading, fit_alpha(doubling_hops, _median_seconds(summaries, "barrier")))
    limit_seconds = HEADER_AIM * arguments.step_ms / 1e3
    reasoned = [
        limits(network, seconds_per_row(reading), limit_seconds, reading)
        for network in _networks(_median_seconds(summaries, "all_gather"), arguments)
    ]
    for result in reasoned:
        _print_limits(result, arguments.step_ms)
    return {
        "row_bytes": ROW_BYTES,
        "run": {str(size): summary for size, summary in summaries.items()},
        "reading_us": {str(size): 1e6 * seconds for size, seconds in reading.items()},
        "reasoned": reasoned,
    }


def _exchange_summary(size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Collective over the world: the first ``size`` ranks measure, the remaining ranks wait without using a core."""
    group = dist.new_group(list(range(size)))
    summary: dict[str, Any] = {}
    if dist.get_rank() < size:
        variants = measure(partial(_exchanges, group, dist.get_rank() * arguments.hosts // size), arguments, group)
        summary = summarize(variants)
        by_name = {variant.name: variant for variant in variants}
        ratios = round_ratios(by_name["tree"], by_name["all_gather"])
        summary["tree"]["ratio_to_all_gather"] = statistics.median(ratios)
    dist.barrier()
    return summary


@contextmanager
def _on_host(number: int) -> Iterator[None]:
    """In the first call on a group in the block, this rank claims to run on the host of this number."""
    own_card = first_meeting.own_card
    first_meeting.own_card = lambda: {**own_card(), "boot": str(number)}
    try:
        yield
    finally:
        first_meeting.own_card = own_card


def _exchanges(group: dist.ProcessGroup, host: int) -> list[Variant]:
    synchronizer = Synchronizer(Settings())
    row = encode_header(Header())
    own = torch.zeros(ROW_BYTES, dtype=torch.uint8)
    rows = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]

    def call(body: Callable[[Call], object]) -> None:
        with synchronizer.call(Operation.ALL_REDUCE, group) as opened, opened.phase("agree"):
            body(opened)

    with _on_host(host):
        call(lambda opened: opened.exchange_headers(*row))  # connects the ranks
    return [
        Variant("barrier", partial(dist.barrier, group)),
        Variant("all_gather", partial(dist.all_gather, rows, own, group)),
        Variant("tree", partial(call, lambda opened: opened.exchange_headers(*row))),
        Variant("agree()", partial(call, lambda opened: agree(opened, Header(), {}))),
    ]


class _Imagined(Call):
    """A call of ``size`` imagined ranks with equal headers, without communication."""

    size = 1

    def exchange_headers(self, *header: bytes) -> list[bytes]:
        return [part * self.size for part in header]


def reading_seconds(size: int) -> float:
    """Median time of one agree() of ``size`` rows that match, without the exchange."""
    seconds = []
    groups = Groups(dist.group.WORLD)  # never connected
    groups.endpoints_exchanged = True
    settings = Settings(checks=Checks("off"))
    for _ in range(READINGS):
        with _Imagined(GroupState(groups), Operation.ALL_REDUCE, settings, "") as call:
            call.size = size
            start = time.perf_counter()
            agreement = agree(call, Header(), {})
            assert agreement.divisor == size
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _networks(gathers: dict[int, float], arguments: argparse.Namespace) -> list[Network]:
    """The modelled networks; fitted networks are this machine, as crowded as during the runs."""
    beta = 1e-9 / arguments.gigabytes_per_second
    networks = [Network("given", arguments.alpha_us / 1e6, beta)]
    if fitting := {size: seconds for size, seconds in gathers.items() if not _crowded(size)}:
        name = f"fitted to the runs of up to {max(fitting)} ranks"
        networks.append(Network(name, fit_alpha(ring_hops, fitting), beta))
    if any(_crowded(size) for size in gathers):
        name = f"fitted to all runs, up to {max(gathers)} ranks; inflated by oversubscription"
        networks.append(Network(name, fit_alpha(ring_hops, gathers), beta))
    return networks


def _median_seconds(summaries: dict[int, dict[str, Any]], name: str) -> dict[int, float]:
    return {size: summary[name]["median_ms"] / 1e3 for size, summary in summaries.items()}


def _print_exchanges(summaries: dict[int, dict[str, Any]]) -> None:
    rounds = summaries[2]["barrier"]["n"]
    print(f"\nheader, run: us, medians of {rounds} rounds; * more ranks than cores, an upper bound")
    print(" ranks    bytes   barrier  all_gather     p90   a hop   ratio      tree   ratio   agree()")
    for size, summary in summaries.items():
        barrier, gather, tree, whole = (summary[name] for name in ("barrier", "all_gather", "tree", "agree()"))
        times = f"{1e3 * barrier['median_ms']:10.0f}{1e3 * gather['median_ms']:12.0f}{1e3 * gather['p90_ms']:8.0f}"
        hop = f"{1e3 * gather['median_ms'] / ring_hops(size):8.0f}{gather['median_ratio']:8.2f}"
        mark = "*" if _crowded(size) else " "
        own = f"{1e3 * tree['median_ms']:10.0f}{tree['ratio_to_all_gather']:8.2f}{1e3 * whole['median_ms']:10.0f}"
        print(f"{size:6}{mark}{size * ROW_BYTES:8}{times}{hop}{own}")
    print(
        "bytes: what each rank then holds; ratio: all_gather to barrier, tree to all_gather; agree(): tree and reading"
    )


def _print_shape(reading: dict[int, float], barrier_alpha: float) -> None:
    print("\nheader, REASONED, NOT RUN, but for reading, which one rank ran alone")
    print(f"{'':15}{'all_gather, a ring':>22}{'recursive doubling':>22}{'reading':>12}")
    print(f"{'ranks':>6}{'bytes':>9}{'messages':>12}{'hops':>10}{'hops':>22}{'ms':>12}")
    for size, seconds in reading.items():
        counts = f"{2 * ring_hops(size):12,}{ring_hops(size):10,}{doubling_hops(size):22}"
        print(f"{size:6,}{size * ROW_BYTES:9,}{counts}{1e3 * seconds:12.2f}")
    print(f"messages: sent by each rank; a hop of gloo's barrier, run here: {1e6 * barrier_alpha:.0f} us")


def _print_limits(result: dict[str, Any], step_ms: float) -> None:
    sizes = (64, 256, 1024, 4096)
    print(f"\nREASONED, alpha {result['alpha_us']:.0f} us, {result['network']}:")
    print(f"exchange alone in ms, and the most ranks under {HEADER_AIM:.0%} of a step of {step_ms:g} ms")
    print(f"{'ranks':>20}" + "".join(f"{size:8,}" for size in sizes) + f"{'most':>10}{'+ reading':>10}")
    for way in ("all_gather", "recursive_doubling"):
        times = "".join(f"{result[way]['exchange_ms'].get(str(size), math.nan):8.1f}" for size in sizes)
        most = f"{result[way]['most_ranks']:10,}{result[way]['most_ranks_with_reading']:10,}"
        print(f"{way.replace('_', ' '):20}{times}{most}", flush=True)


if __name__ == "__main__":
    with quiet_interrupt():
        main()
