"""Does every rank leave word when torchrun ends the job, because one of them died?

torchrun ends the siblings of a rank that failed with SIGTERM, a tenth of a second later, so each of them is in a race
between its report and its end. Run as a script, this file is one rank: ``test_lost_under_torchrun.py FOLDER STORY``.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers.rank_faults import WAITS, do_when
from tests.helpers.scripts import fork_script
from tests.helpers.tiers import count

RANKS = 3
RUNS = count(20, 3)
AT_WORK = "while the others work"
IN_C_CODE = "while the others are in C code"
MOMENTS = ("all_reduce", "forward", "backward", "user code", AT_WORK, IN_C_CODE)
LIMIT_SECONDS = 120.0


def _train(folder: str, story: str) -> None:
    """Five steps; in the fourth the story happens: ``RANK MOMENT`` of a kill."""
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layer = torch.nn.Linear(64, 64)
    model = LegacyDistributedDataParallel(layer, checks=Checks(report_dir=folder), timeout_seconds=60.0)
    try:
        for step in range(5):
            if step == 3:
                _happen(story, rank, layer)
            model(torch.randn(8, 64)).square().sum().backward()
            model.all_reduce()
            model.zero_grad()
    finally:
        dist.destroy_process_group()


def _happen(story: str, rank: int, layer: torch.nn.Linear) -> None:
    victim, moment = story.split(maxsplit=1)
    if int(victim) != rank:
        if moment == AT_WORK:
            threading.Event().wait()
        elif moment == IN_C_CODE:
            ctypes.PyDLL(None).sleep(60)  # holds the GIL: no Python runs any more in this process
        return
    end = partial(os.kill, os.getpid(), signal.SIGKILL)
    if moment == "all_reduce":
        sys.setprofile(do_when(WAITS, end))
    elif moment == "forward":
        layer.register_forward_hook(lambda *_: end())
    elif moment == "backward":
        layer.weight.register_hook(lambda _: end())
    else:
        end()


def _lose_one(folder: Path, number: int, victim: int, moment: str) -> bool:
    """Whether every survivor's file names the victim; that each of them tells something is asserted."""
    mine = folder / str(number)
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))
    command = (*launch, __file__, str(mine), f"{victim} {moment}")
    job = fork_script(*command, limit_seconds=LIMIT_SECONDS, forks_children=True)
    output = job.stdout + job.stderr
    assert job.returncode != 0
    told = []
    for rank in sorted({*range(RANKS)} - {victim}):
        files = list(mine.glob(f"legacy_ddp-*-rank{rank}-*.txt"))
        assert len(files) == 1, f"run {number}, rank {rank} of victim {victim} in {moment}:\n{output}"
        head, _, rest = files[0].read_text().partition("\n\n")
        assert f"rank {rank} of {RANKS}, process" in head
        is_named = f"missing rank {victim} (" in " ".join(rest.split())
        assert is_named or "most recent call first" in rest, f"run {number}, rank {rank}: {rest or 'nothing'}"
        told.append(is_named)
    return all(told)


@pytest.mark.slow
@pytest.mark.thorough  # tests/watchdog/test_lost_ranks.py kills ranks without a launcher
def test_every_survivor_of_a_killed_rank_leaves_word(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    # A step of 7 in the list of 18: the first few runs differ in the victim and in the moment.
    every = list(product(range(RANKS), MOMENTS))
    stories = [every[7 * number % len(every)] for number in range(RUNS)]
    named = sum(_lose_one(tmp_path, number, *story) for number, story in enumerate(stories))
    record_property("runs_with_the_victim_named_by_all", named)
    print(f"\nthe killed rank is named in every survivor's file in {named} of {RUNS} runs")


if __name__ == "__main__":
    _train(*sys.argv[1:])
