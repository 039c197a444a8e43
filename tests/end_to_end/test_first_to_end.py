"""Under torchrun: the rank at fault is the first to end, and torchrun names it as the root cause.

Run as a script, this file is one rank: ``test_first_to_end.py FAULT HANDLING``.
"""

import atexit
import os
import re
import signal
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel
from tests.helpers.scripts import fork_torchrun
from tests.helpers.tiers import thorough

RANKS = 3
# An end of a large process: workers of a loader to join, memory to free. torchrun looks ten times a second.
SLOW_END_SECONDS = 3.0


def _train(fault: str, handling: str) -> bool:
    """Whether the training failed, and the script has to say so by its exit status."""
    rank = int(os.environ["RANK"])
    first_to_end = 0 if fault == "disagrees" else 1
    if rank == first_to_end:
        atexit.register(threading.Event().wait, SLOW_END_SECONDS)  # registered first: runs last
    dist.init_process_group("gloo")
    model = LegacyDistributedDataParallel(torch.nn.Linear(3, 2))
    try:
        for step in range(4):
            model.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            if step == 3 and rank == 1:
                _happen(fault, model)
            model.all_reduce()
    except LegacyDDPError as error:
        if handling == "exits":
            raise SystemExit(1) from error
        if handling == "exits later":
            return True
        if handling == "wrapped":
            raise ValueError("training failed") from error
        raise
    finally:
        if handling == "destroyed":
            dist.destroy_process_group()
    return False


def _happen(fault: str, model: LegacyDistributedDataParallel) -> None:
    if fault == "raises":
        raise KeyError("lost in user code")
    if fault == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    model.all_reduce(sample_size=1 if fault == "disagrees" else -1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, handling, root",
    [
        thorough("raises", "destroyed", 1),  # test_outside_under_torchrun has it beside waiting ranks
        thorough("is killed", "exits", 1),
        thorough("fails in the call", "exits later", 1),
        ("disagrees", "wrapped", 0),  # shows the traceback
    ],
)
def test_torchrun_names_the_rank_at_fault_as_the_root_cause_however_slowly_it_ends(
    fault: str, handling: str, root: int
) -> None:
    job = fork_torchrun(RANKS, __file__, fault, handling)

    assert job.returncode == 1
    first = re.search(r"Root Cause.*?rank +: (\d+)", job.stderr, re.DOTALL)
    assert first is not None, job.stderr
    assert int(first[1]) == root, job.stderr


if __name__ == "__main__":
    sys.exit(_train(*sys.argv[1:]))
