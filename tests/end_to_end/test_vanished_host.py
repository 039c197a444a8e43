"""Hosts whose network vanishes in mid-training, which the others name, or is slow, of which nobody speaks.

Run as a script, this file is one rank: `test_vanished_host.py FOLDER [slow]`.
"""

import json
import logging
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from legacy_ddp import Checks, LegacyDistributedDataParallel, LostPeerError
from tests.helpers.hosts import Hosts, leave_facts
from tests.helpers.processes import slowness
from tests.helpers.small_models import transport_line

TIMEOUT_SECONDS = 6.0
STEPS_BEFORE = 5
SLOW_MBIT, SLOW_STEPS = 1.0, 3

pytestmark = [pytest.mark.slow, pytest.mark.thorough, pytest.mark.hosts]


def _train(folder: Path) -> None:
    """Train until a rank is lost; leave a file that says how that was."""
    rank = os.environ["RANK"]
    logging.basicConfig(filename=folder / f"log-{rank}", level=logging.WARNING)
    dist.init_process_group("gloo")
    checks = Checks(warn_after_seconds=1.5, report_dir=folder / "reports")
    model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1), checks=checks, timeout_seconds=TIMEOUT_SECONDS)
    for step in range(10**6):
        model.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        start = time.monotonic()
        try:
            model.all_reduce()
        except LostPeerError as error:
            seconds = time.monotonic() - start
            # Before the process group ends: torch's own store is gone with the host, and its agent ends this process.
            leave_facts(folder / f"lost-{rank}", [type(error).__name__, error.ranks, error.report, seconds])
            raise SystemExit(1) from None
        if step == STEPS_BEFORE:
            leave_facts(folder / f"trains-{rank}", [])
        time.sleep(0.05)  # leaves the cores to the launchers


def _await(paths: list[Path], seconds: float = 90.0) -> None:
    give_up = time.monotonic() + seconds
    while missing := [path.name for path in paths if not path.exists()]:
        assert time.monotonic() < give_up, missing
        time.sleep(0.05)


@pytest.mark.parametrize("vanishes", [0, pytest.param(1, marks=pytest.mark.soak)])  # 0 has the launcher's store
def test_the_report_names_the_host_that_vanished(vanishes: int, tmp_path: Path) -> None:
    with Hosts(2) as hosts:
        job = hosts.torchrun(__file__, str(tmp_path), nproc_per_node=2)
        _await([tmp_path / f"trains-{rank}" for rank in range(4)])
        hosts.cut(vanishes)
        _await([tmp_path / f"lost-{rank}" for rank in range(4)])
        job.wait(60.0, check=False)

    gone = [2 * vanishes, 2 * vanishes + 1]
    for rank in range(4):
        kind, ranks, report, seconds = json.loads((tmp_path / f"lost-{rank}").read_text())
        # Cut off from each other, each side misses the other.
        missing = [other for other in range(4) if (other in gone) != (rank in gone)]
        host = f"host-{missing[0] // 2}"
        assert (kind, ranks) == ("SyncTimeoutError", missing)
        who = f"missing ranks {missing[0]}-{missing[1]} (cannot be reached, on host {host})"
        assert who in " ".join(report.split())
        assert TIMEOUT_SECONDS * 0.9 < seconds < (TIMEOUT_SECONDS + 5) * slowness()
        (file,) = (tmp_path / "reports").glob(f"*-rank{rank}-*.txt")
        assert report in file.read_text()
    for host in (0, 1):  # said before the timeout, once on each
        logs = [(tmp_path / f"log-{rank}").read_text() for rank in (2 * host, 2 * host + 1)]
        assert sum(f"host-{1 - host}" in log for log in logs) == 1


def test_a_slow_link_between_hosts_is_neither_an_error_nor_a_warning(tmp_path: Path) -> None:
    with Hosts(2, rate_mbit=SLOW_MBIT) as hosts:
        hosts.torchrun(__file__, str(tmp_path), "slow", nproc_per_node=2).wait(120.0)

    left = [torch.load(tmp_path / str(rank), weights_only=True) for rank in range(4)]
    weights, lines, logs = zip(*left, strict=True)
    expected = _net()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(SLOW_STEPS):
        optimizer.zero_grad()
        expected(torch.cat([_batch(rank, step) for rank in range(4)])).square().mean().backward()
        optimizer.step()
    for weight in weights:
        torch.testing.assert_close(weight, expected.weight.detach())
    assert set(lines) == {"transport: host (2 hosts of 2 ranks, gloo between them)"}
    assert set(logs) == {""}


def _net() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(32, 32)


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def _train_slowly(folder: Path) -> None:
    rank = os.environ["RANK"]
    logging.basicConfig(filename=folder / f"log-{rank}", level=logging.WARNING)
    dist.init_process_group("gloo")
    model = LegacyDistributedDataParallel(_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(SLOW_STEPS):
        optimizer.zero_grad()
        model(_batch(int(rank), step)).square().mean().backward()
        model.all_reduce()
        optimizer.step()
    log = (folder / f"log-{rank}").read_text()
    torch.save((model.module.weight.detach(), transport_line(model), log), folder / rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    (_train_slowly if "slow" in sys.argv[2:] else _train)(Path(sys.argv[1]))
