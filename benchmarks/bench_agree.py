"""Cost of agreement: in a training step, and of the header exchange alone by number of ranks.

    torchrun --standalone --nproc-per-node 2 benchmarks/bench_agree.py step [--json FILE]
    torchrun --standalone --nproc-per-node 64 benchmarks/bench_agree.py header --hosts 8 [--json FILE]

Measured like bench_all_reduce.py: variants interleaved round by round, ratios taken within a round. Two questions:

step     a whole training step with checks="info" against "off", and "off" a second time as a control: the distance of
         the control from 1 is noise. Aims: info/off <= 1.05 at update-freq 1, <= 1.03 from 4 on. "off" agrees, too;
         its time is printed as well: for each step, phase agree of the last rank to arrive, which does not wait
header   the exchange of 128 bytes per rank, in groups of 2, 4, 8, ... ranks: over the tree of the library, and as a
         gloo all_gather of the same bytes, against a barrier of the same ranks. With --hosts the ranks claim to run on
         as many hosts, so that the hubs of the tree use TCP, on this machine. Aim: tree / all_gather <= 0.10 at 64
         ranks on 8 hosts. Then modelled times for up to 8,192 ranks, by the model of _scaling.py: in your network
         (--alpha-us, --gigabytes-per-second, --ranks-per-host), not measured, and fitted to these runs, with its error

Ranks that outnumber the cores wait for each other's time slices: such figures are upper bounds, and marked.
"""

import argparse
import math
import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from _fit import typical_and_worst
from _interrupt import quiet_interrupt
from _measure import (
    Variant,
    measure,
    parse,
    print_aims,
    print_table,
    process_group,
    round_ratios,
    summarize,
    verdicts,
    write_results,
)
from _scaling import (
    ROW_BYTES,
    TREE_ROW_BYTES,
    Exchange,
    Network,
    fit_network,
    most_ranks,
    ring,
    seconds_per_message,
    seconds_per_row,
    tree,
)
from _workloads import LAYERS, Transformer, predict_tokens, step, tokens

from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp._call.state import Synchronizer
from legacy_ddp._ranks import first_meeting
from legacy_ddp._ranks.agree import agree
from legacy_ddp._ranks.call import Call, GroupState
from legacy_ddp._ranks.header import Header, Operation, SegmentIds, encode_header, encode_segments
from legacy_ddp._ranks.private_groups import Groups
from legacy_ddp._ranks.star import _ROW, Star
from legacy_ddp._ranks.star_sockets import set_options
from legacy_ddp._settings import Settings

STEP_AIMS = {1: 1.05, 4: 1.03}  # from this update-freq on: info/off
HEADER_AIM = 0.03  # of a step
TREE_AIMS = {"tree / all_gather, 64 ranks": 0.10}
MODELLED = tuple(2**power for power in range(1, 14))
CHILDREN = (1, 2, 4, 8, 16, 32)
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
    group.add_argument("--ranks-per-host", type=int, default=8, help="default: %(default)s")
    group.add_argument("--step-ms", type=float, default=300.0, help="your training step (default: %(default)s)")
    arguments = parse(parser, given)
    for name, value in (("hosts", arguments.hosts), ("ranks-per-host", arguments.ranks_per_host)):
        if value < 1:
            parser.error(f"--{name} is out of range: got {value}, expected 1 or more")
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
    reading = {size: reading_seconds(size) for size in MODELLED} if dist.get_rank() == 0 else {}
    hub = {ranks: hub_seconds(ranks) for ranks in CHILDREN} if dist.get_rank() == 0 else {}
    dist.barrier()  # the others wait, instead of disturbing by leaving
    if dist.get_rank() != 0:
        return {}
    _print_exchanges(summaries)
    row_seconds, message_seconds = seconds_per_row(reading), seconds_per_message(hub)
    print(f"\nalone, on one rank: reading a row {1e9 * row_seconds:.0f} ns, a message {1e6 * message_seconds:.1f} us")
    modelled = _given(message_seconds, arguments), _fitted(summaries, message_seconds, arguments)
    for result in modelled:
        _print_model(result)
    limit = HEADER_AIM * arguments.step_ms / 1e3
    most = {way: most_ranks(seconds, limit) for way, seconds in _given_seconds(message_seconds, arguments).items()}
    print(f"given: the most ranks under {HEADER_AIM:.0%} of a step of {arguments.step_ms:g} ms:", most)
    ratios = {f"tree / all_gather, {size} ranks": summaries[size]["tree"]["ratio_to_all_gather"] for size in sizes}
    aims = {name: aim for name, aim in TREE_AIMS.items() if name in ratios}
    print_aims(ratios, aims)
    return {
        "row_bytes": {"all_gather": ROW_BYTES, "tree": TREE_ROW_BYTES},
        "run": {str(size): summary for size, summary in summaries.items()},
        "aims": aims,
        "verdicts": verdicts(ratios, aims),
        "reading_us": {str(size): 1e6 * seconds for size, seconds in reading.items()},
        "hub_us": {str(ranks): 1e6 * seconds for ranks, seconds in hub.items()},
        "modelled": modelled,
        "most_ranks": most,
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


def hub_seconds(ranks: int) -> float:
    """Median time of one exchange on a hub of hubs, over TCP, whose ``ranks`` below have sent their rows."""
    pairs = {rank: _tcp_pair() for rank in range(1, ranks + 1)}
    hub = Star(0, hubs={rank: own for rank, (own, _) in pairs.items()})
    below = [Star(rank, above=(0, other)) for rank, (_, other) in pairs.items()]
    columns = (encode_segments(SegmentIds()), *encode_header(Header()))
    row, seconds = b"".join(columns), []
    with ThreadPoolExecutor(ranks + 1) as pool:
        list(pool.map(lambda star: star.introduce({}, _never), [hub, *below]))
    for _ in range(READINGS):
        for star in below:
            star._send(0, _ROW, row, _never)
        start = time.perf_counter()
        hub.exchange(columns, _never)
        seconds.append(time.perf_counter() - start)
        for star in below:
            star._receive(0, _ROW, len(row) * (ranks + 1), _never)
    for star in (hub, *below):
        star.close()
    return statistics.median(seconds)


def _never() -> None:
    """Called after a slice of a wait; no wait is as long."""


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = socket.create_connection(server.getsockname())
        own = server.accept()[0]
    for connection in (own, other):
        set_options(connection)
    return own, other


def _ways(per_host: int) -> dict[str, Callable[[int], Exchange]]:
    return {"all_gather": ring, "tree": partial(tree, per_host=per_host), "tree, hosts of 1": partial(tree, per_host=1)}


def _given_seconds(message_seconds: float, arguments: argparse.Namespace) -> dict[str, Callable[[int], float]]:
    """Times by number of ranks in the given network, where ranks share no cores. A hop of gloo has its messages."""
    alpha, beta = arguments.alpha_us / 1e6, 1e-9 / arguments.gigabytes_per_second
    gloo, own = Network(alpha, 0.0, beta), Network(alpha, message_seconds, beta)
    return {
        way: lambda size, of=exchange, network=gloo if exchange is ring else own: network.seconds(of(size))
        for way, exchange in _ways(arguments.ranks_per_host).items()
    }


def _given(message_seconds: float, arguments: argparse.Namespace) -> dict[str, Any]:
    ways = {
        way: {"exchange_ms": {str(size): 1e3 * seconds(size) for size in MODELLED}}
        for way, seconds in _given_seconds(message_seconds, arguments).items()
    }
    costs = f"{arguments.alpha_us:g} us a hop, {arguments.gigabytes_per_second:g} GB/s"
    return {"network": f"given, {costs}, {arguments.ranks_per_host} ranks a host", "ways": ways}


def _fitted(
    summaries: dict[int, dict[str, Any]], message_seconds: float, arguments: argparse.Namespace
) -> dict[str, Any]:
    """The model of this machine, fitted to the runs."""
    cores, beta, ways = os.cpu_count() or 1, 1e-9 / arguments.gigabytes_per_second, {}
    for way, exchange, message in (
        ("all_gather", ring, 0.0),
        ("tree", lambda size: tree(size, -(-size // arguments.hosts)), message_seconds),
    ):
        measured = _median_seconds(summaries, way)
        network = fit_network(exchange, measured, message_seconds=message, beta_seconds=beta, cores=cores)
        modelled = {size: network.seconds(exchange(size)) for size in measured}
        ways[way] = {
            "alpha_us": 1e6 * network.alpha_seconds,
            "turn_us": 1e6 * network.turn_seconds,
            "exchange_ms": {str(size): 1e3 * seconds for size, seconds in modelled.items()},
            "residuals": {str(size): modelled[size] / seconds - 1 for size, seconds in measured.items()},
        }
    return {"network": f"this machine, {cores} cores, fitted to the runs", "ways": ways}


def _median_seconds(summaries: dict[int, dict[str, Any]], name: str) -> dict[int, float]:
    return {size: summary[name]["median_ms"] / 1e3 for size, summary in summaries.items()}


def _print_exchanges(summaries: dict[int, dict[str, Any]]) -> None:
    rounds = summaries[2]["barrier"]["n"]
    print(f"\nheader, run: us, medians of {rounds} rounds; * more ranks than cores, an upper bound")
    print(" ranks    bytes   barrier  all_gather     p90   a hop   ratio      tree   ratio   agree()")
    for size, summary in summaries.items():
        barrier, gather, tree, whole = (summary[name] for name in ("barrier", "all_gather", "tree", "agree()"))
        times = f"{1e3 * barrier['median_ms']:10.0f}{1e3 * gather['median_ms']:12.0f}{1e3 * gather['p90_ms']:8.0f}"
        hop = f"{1e3 * gather['median_ms'] / (size - 1):8.0f}{gather['median_ratio']:8.2f}"
        mark = "*" if _crowded(size) else " "
        own = f"{1e3 * tree['median_ms']:10.0f}{tree['ratio_to_all_gather']:8.2f}{1e3 * whole['median_ms']:10.0f}"
        print(f"{size:6}{mark}{size * ROW_BYTES:8}{times}{hop}{own}")
    print(
        "bytes: what each rank then holds; ratio: all_gather to barrier, tree to all_gather; agree(): tree and reading"
    )


def _print_model(result: dict[str, Any]) -> None:
    sizes = list(result["ways"]["all_gather"]["exchange_ms"])
    print(f"\nMODELLED, {result['network']}: ms without reading")
    print(f"{'ranks':16}" + "".join(f"{int(size):8,}" for size in sizes))
    for way, row in result["ways"].items():
        print(f"{way:16}" + "".join(f"{row['exchange_ms'][size]:8.2f}" for size in sizes))
        if missed := row.get("residuals"):
            typical, worst = typical_and_worst(missed)
            costs = f"{row['alpha_us']:.0f} us a hop, {row['turn_us']:.0f} us a turn"
            print(f"  {costs}; off by {typical:.0%} (median), at most by {missed[worst]:+.0%} ({worst} ranks)")


if __name__ == "__main__":
    with quiet_interrupt():
        main()
