"""Cost of the control plane of the library: for a process as ranks grow, and for a rank among many simulated ranks."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from _measure import verdicts
from _memory import SHARES, kernel_bytes
from bench_agree import reading_seconds
from torch import nn

from legacy_ddp import LayoutError, LegacyDistributedDataParallel
from legacy_ddp import _torch as internals
from legacy_ddp._explain.missing import compose, poll_ranks
from legacy_ddp._memory.layout import Named, build_inventory, inventory_digest
from legacy_ddp._ranks.agree import agree
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.header import Header
from legacy_ddp._ranks.private_groups import groups_of
from legacy_ddp._watchdog.client import own_hosts
from legacy_ddp._watchdog.server import StatusServer
from legacy_ddp._watchdog.status import RankStatus, own_status
from tests.helpers.many_ranks import run_kinds

STEPS = 3
TENSORS = 2000  # in an inventory
ODD_RANK = 5  # of the simulated ranks: has another layout, or is missing in a report
RANKS_OF_A_HOST = 8  # simulated
FACTS = ("descriptors", "threads", "private_kib")
# 36: torch DDP has 24 descriptors in a process of 16 ranks, and the library may have 12.
AIMS = {
    "descriptors of a process, 16 ranks": 36,
    "descriptors of the library, 16 ranks beyond 8": 0,
    "store operations, 16 ranks beyond 8": 0,
    "reading 1,024 equal rows, ms": 0.1,
    "LayoutError of 1,024 ranks, MB": 1.0,
}
Facts = dict[str, float]


def answer_control(arguments: argparse.Namespace) -> dict[str, Any]:
    """Collective: measure in ever larger groups of one host, then without processes on rank 0, which prints."""
    before = _footprint()
    sizes = [2**power for power in range(1, dist.get_world_size().bit_length())]
    _footprints(dist.get_world_size())  # the first use of everything, which no group needs again
    processes = {size: _footprints(size) for size in sizes}
    if dist.get_rank() == 0:
        simulated = {ranks: simulate(ranks) for ranks in arguments.simulated}
    dist.barrier()  # the others wait, instead of disturbing by leaving
    if dist.get_rank() != 0:
        return {}
    base = before["descriptors"] - processes[max(sizes)]["torch DDP"]["descriptors"]["median"]
    for rows in processes.values():
        rows["process"] = {"descriptors": _total(base, rows)}
    _print_processes(processes)
    _print_simulated(simulated)
    found = _aimed_at(processes, simulated)
    aims = {name: aim for name, aim in AIMS.items() if name in found}
    for name, aim in aims.items():
        print(f"{name:50}{found[name]:12,.3g}   aim {aim:,}: {verdicts(found, aims)[name]}", flush=True)
    return {
        "processes": {str(size): rows for size, rows in processes.items()},
        "simulated": {str(ranks): row for ranks, row in simulated.items()},
        "aims": aims,
        "verdicts": verdicts(found, aims),
    }


def _footprint() -> Facts:
    """Of this process. Private memory: that this process has written to."""
    private = kernel_bytes(SHARES)["Private_Dirty"] / 1024 if SHARES.exists() else 0
    counts = (len(os.listdir(Path("/proc/self", folder))) for folder in ("fd", "task"))
    return dict(zip(FACTS, (*counts, private), strict=True))


def _footprints(size: int) -> dict[str, dict[str, Facts]]:
    """Collective over the world: what torch DDP with a group, and then the library on the group add to a process."""
    before = _footprint()
    group = dist.new_group(list(range(size)))
    found: dict[str, Facts] = {}
    is_hub = False
    if dist.get_rank() < size:
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(4, 1), process_group=group)
        _train(ddp)
        found["torch DDP"], after_ddp = _beyond(before)
        with _counted_store() as counts:
            model = LegacyDistributedDataParallel(nn.Linear(4, 1), process_group=group)
        _train(model)
        found["ours"], _ = _beyond(after_ddp)
        found["ours"] |= {name: float(count) for name, count in counts.items()}
        is_hub = groups_of(group, None).cards[dist.get_rank(group)]["hub"] == dist.get_rank(group)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (is_hub, found))
    dist.barrier()
    return summarize_ranks(gathered[:size])


def _beyond(before: Facts) -> tuple[Facts, Facts]:
    after = _footprint()
    return {name: after[name] - before[name] for name in FACTS}, after


def _train(model: nn.Module) -> None:
    for _ in range(STEPS):
        model.zero_grad()
        model(torch.ones(1, 4)).sum().backward()
        if isinstance(model, LegacyDistributedDataParallel):
            model.all_reduce()


def summarize_ranks(ranks: Sequence[tuple[bool, Mapping[str, Facts]]]) -> dict[str, dict[str, Facts]]:
    """Each fact of the median rank, and of the hub."""
    (hub,) = (facts for is_hub, facts in ranks if is_hub)
    return {
        what: {
            fact: {"median": statistics.median_low(facts[what][fact] for _, facts in ranks), "hub": hub[what][fact]}
            for fact in hub[what]
        }
        for what in hub
    }


class _CountingStore(dist.Store):
    """A store that counts its operations. Polls are left out: their number depends on the time."""

    kept: ClassVar[list["_CountingStore"]] = []  # a group of gloo does not keep the Python part of its store

    def __init__(self, store: Any, counts: dict[str, int]) -> None:
        super().__init__()
        self._store, self._counts = store, counts
        self.kept.append(self)

    def set(self, key: str, value: str) -> None:
        self._note(key)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self._note(key)
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        if amount or not key.endswith("arrivals"):
            self._note(key)
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        self._store.wait(keys, timeout)

    def _note(self, key: str) -> None:
        self._counts["store_operations_of_gloo" if "/payload/" in key else "store_operations"] += 1


@contextmanager
def _counted_store() -> Iterator[dict[str, int]]:
    """The number of store operations of the library in the block, and those of its gloo group."""
    counts, group_store = {"store_operations": 0, "store_operations_of_gloo": 0}, internals.group_store
    internals.group_store = lambda group: _CountingStore(group_store(group), counts)
    try:
        yield counts
    finally:
        internals.group_store = group_store


def _total(base: float, rows: Mapping[str, Mapping[str, Facts]]) -> Facts:
    """The descriptors of a process with torch's group and the library. ``base``: of a process without both."""
    return {
        rank: base + sum(rows[what]["descriptors"][rank] for what in ("torch DDP", "ours"))
        for rank in ("median", "hub")
    }


def simulate(ranks: int) -> Facts:
    """Costs of one rank among as many simulated ranks, on this rank alone."""
    return {"reading_ms": 1e3 * reading_seconds(ranks), **_layout_error(ranks), **_report(ranks)}


def _layout_error(ranks: int) -> Facts:
    """Bytes received and processor time of a LayoutError, where one rank has another inventory."""
    kinds = [int(rank == ODD_RANK) for rank in range(ranks)]
    inventories = [_inventory(torch.float32), _inventory(torch.float64)]
    outcomes = run_kinds(kinds, partial(_disagree, inventories))
    return {
        "layout_error_mb": max(received for _, received in outcomes) / 1e6,
        "layout_error_cpu_s": max(seconds for seconds, _ in outcomes),
    }


def _inventory(odd: torch.dtype) -> dict[str, str]:
    dtypes = [odd, *[torch.float32] * (TENSORS - 1)]
    named = [Named((f"layers.{i}.self_attn.q_proj.weight",), torch.zeros(2, 2, dtype=d)) for i, d in enumerate(dtypes)]
    return build_inventory(named, kind="parameter")


def _disagree(inventories: Sequence[dict[str, str]], call: Call, kind: int) -> float:
    start = time.thread_time()
    with suppress(LayoutError):
        agree(call, Header(layout=inventory_digest(inventories[kind])), inventories[kind])
        raise AssertionError("two layouts were not noticed")
    return time.thread_time() - start


def _report(ranks: int) -> Facts:
    """Seconds of the poll and of the text of a report about a missing rank, over sockets of this process."""
    status = {False: RankStatus(5, "all_reduce() call 5", True), True: RankStatus(4, "all_reduce() call 4")}
    status[False].activity.enter("agree", "all_reduce() call 5")
    of_host: list[Any] = []
    servers = {
        is_odd: StatusServer(0, lambda _, own=own: own_status(own, of_host), lambda *_: None)
        for is_odd, own in status.items()
    }
    peers = [_peer(servers[rank == ODD_RANK], rank) for rank in range(ranks)]
    of_host += peers[:RANKS_OF_A_HOST]
    try:
        for server in servers.values():
            server.start(None)
        with ThreadPoolExecutor(1) as pool:  # this thread is the training thread, and waits
            start, cpu_start = time.perf_counter(), time.process_time()
            rows = pool.submit(poll_ranks, peers, peers[0], twice=True).result()
            polled, cpu_polled = time.perf_counter(), time.process_time()
            report = compose(rows)
            composed = time.perf_counter()
    finally:
        for server in servers.values():
            server.close("")
    assert report.missing == (ODD_RANK,), report.head
    return {
        "poll_s": polled - start,
        "poll_cpu_s": cpu_polled - cpu_start,
        "report_ms": 1e3 * (composed - polled),
        "report_lines": report.text.count("\n") + 1,
        "report_kb": len(json.dumps(asdict(report))) / 1e3,
    }


def _peer(server: StatusServer, rank: int) -> Any:
    """The endpoint of a simulated rank. Only the ranks of the first host are looked up in /proc."""
    identity = replace(server.endpoint.identity, host=f"node-{rank // RANKS_OF_A_HOST}")
    if rank >= RANKS_OF_A_HOST and len(own_hosts()) > 1:  # without a network, all addresses are those of this host
        identity = replace(identity, machine=identity.host)
    return replace(server.endpoint, rank=rank, identity=identity)


def _aimed_at(processes: Mapping[int, Any], simulated: Mapping[int, Facts]) -> dict[str, float]:
    found: dict[str, float] = {}
    if 16 in processes:
        more, less = processes[16]["ours"], processes[8]["ours"]
        found["descriptors of a process, 16 ranks"] = processes[16]["process"]["descriptors"]["median"]
        for name, fact in {"descriptors of the library": "descriptors", "store operations": "store_operations"}.items():
            found[f"{name}, 16 ranks beyond 8"] = more[fact]["median"] - less[fact]["median"]
    if 1024 in simulated:
        found["reading 1,024 equal rows, ms"] = simulated[1024]["reading_ms"]
        found["LayoutError of 1,024 ranks, MB"] = simulated[1024]["layout_error_mb"]
    return found


def _print_processes(processes: Mapping[int, Mapping[str, Mapping[str, Facts]]]) -> None:
    print("\ncontrol, one host: added to a process, median rank and hub")
    print(f"{'':40}" + "".join(f"{size:>9} ranks" for size in processes))
    for what, facts in processes[max(processes)].items():
        for fact in facts:
            cells = [rows[what][fact] for rows in processes.values()]
            print(f"{f'{what}: {fact}':40}" + "".join(f"{cell['median']:8.0f},{cell['hub']:6.0f}" for cell in cells))


def _print_simulated(simulated: Mapping[int, Facts]) -> None:
    print("\ncontrol, one rank among simulated ranks")
    print(f"{'':50}" + "".join(f"{ranks:12,}" for ranks in simulated))
    for fact in next(iter(simulated.values()), {}):
        print(f"{fact:50}" + "".join(f"{row[fact]:12,.4g}" for row in simulated.values()), flush=True)
