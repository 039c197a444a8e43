"""Do many ranks on many hosts end in the weights of one process, also where the link between the hosts is slow?

Run as a script, this file is one rank: ``test_many_hosts.py main RANKS_PER_HOST OPTIONS``, of the main job on claimed
hosts with OPTIONS as of examples/train_lm.py, or ``test_many_hosts.py slow FOLDER``, of a job on namespaced hosts.
"""

import importlib
import logging
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.hosts import Hosts, on_host, reason_not_permitted
from tests.helpers.scripts import EXAMPLES, assert_same_bits, example, fork_ranks, load
from tests.helpers.tiers import soak

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

STEPS = 20
LIMIT_SECONDS = 1800.0  # 64 processes on a loaded machine
SLOW_MBIT, SLOW_STEPS = 1.0, 3


@pytest.mark.parametrize(
    "world_size, per_host",
    [(8, 2), soak(64, 8)],
)
def test_the_main_job_on_claimed_hosts_ends_in_the_weights_of_one_process_on_the_joined_batch(
    world_size: int, per_host: int, tmp_path: Path
) -> None:
    """To the last bit, with the dropout of each micro-batch and the order of the sums of ``--reproducible``."""
    options = ("--reproducible", "--micro-batches", str(world_size), "--batch-size", "1", "--held-out", "64")
    options += ("--steps", str(STEPS), "--save-every", str(STEPS), "--save")
    alone = example(1, "train_lm.py", *options, str(tmp_path / "one"))
    assert alone.returncode == 0, alone.stderr
    main_job = (__file__, "main", str(per_host), *options, str(tmp_path / "many"))
    shared = fork_ranks(world_size, *main_job, limit_seconds=LIMIT_SECONDS)
    assert shared.returncode == 0, shared.stderr

    assert_same_bits(*(load(tmp_path / folder / f"step-{STEPS:08d}.pt")["model"] for folder in ("one", "many")))


def _train_the_main_job(per_host: int) -> None:
    sys.path.append(str(EXAMPLES))
    with on_host(str(int(os.environ["RANK"]) // per_host)):
        importlib.import_module("train_lm").main()


@pytest.mark.skipif(reason_not_permitted() is not None, reason=str(reason_not_permitted()))
def test_a_slow_link_between_four_hosts_is_neither_an_error_nor_a_warning(tmp_path: Path) -> None:
    with Hosts(4, rate_mbit=SLOW_MBIT) as hosts:
        hosts.torchrun(__file__, "slow", str(tmp_path), nproc_per_node=2).wait(120.0)

    weights, log = zip(*(torch.load(tmp_path / str(rank), weights_only=True) for rank in range(8)), strict=True)
    expected = _net()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for step in range(SLOW_STEPS):
        optimizer.zero_grad()
        expected(torch.cat([_batch(rank, step) for rank in range(8)])).square().mean().backward()
        optimizer.step()
    for weight in weights:
        torch.testing.assert_close(weight, expected.weight.detach())
    assert set(log) == {""}


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
    torch.save((model.module.weight.detach(), (folder / f"log-{rank}").read_text()), folder / rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv.pop(1) == "main":
        _train_the_main_job(int(sys.argv.pop(1)))
    else:
        _train_slowly(Path(sys.argv[1]))
