"""Does the main job train on two hosts as on one, with a kill in between?

Run as a script, this file is one rank of the main job, of which rank 1 kills itself: `test_main_job_on_hosts.py
OPTIONS`, as of examples/train_lm.py.
"""

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.helpers.hosts import Hosts
from tests.helpers.scripts import EXAMPLES, assert_same_bits, fork_torchrun, load

STEPS = 4
SHORT = (
    *("--steps", str(STEPS), "--update-freq", "1", "--batch-size", "4", "--held-out", "256"),
    *("--save-every", "1", "--resume", "auto"),
)
KILLED_IN_STEP = 3
PORT = 29400
RENDEZVOUS = ("--rdzv-backend=c10d", "--rdzv-id=job", "--max-restarts=1")

pytestmark = [pytest.mark.slow, pytest.mark.hosts]


@pytest.mark.thorough
def test_the_main_job_on_two_hosts_loses_a_rank_and_ends_in_the_bits_of_one_host(tmp_path: Path) -> None:
    alone, shared = tmp_path / "alone", tmp_path / "shared"
    undisturbed = fork_torchrun(2, "train_lm.py", *SHORT, "--save", str(alone))
    assert undisturbed.returncode == 0, undisturbed.stderr
    shared.mkdir()
    with Hosts(2) as hosts:
        hosts[1].run("mount", "-t", "tmpfs", "none", str(shared))  # a disk of its own under the same name
        job = hosts.torchrun(
            __file__,
            *(*SHORT, "--save", str(shared)),
            options=(*RENDEZVOUS, f"--rdzv-endpoint={hosts.addresses[0]}:{PORT}"),
            environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
        results = job.wait(120.0)
        files_on_host_1 = hosts[1].run("ls", str(shared))

    assert "exitcode: -9" in results[1].text
    done = [line for line in results[0].text.splitlines() if line.startswith("done: ")]
    assert done == undisturbed.stdout.splitlines()
    assert files_on_host_1 == ""  # rank 0 alone reads and writes
    assert len(list(shared.iterdir())) == STEPS
    assert_same_bits(*(load(folder / f"step-{STEPS:08d}.pt") for folder in (alone, shared)))


def _train_and_die() -> None:
    sys.path.append(str(EXAMPLES))
    train_lm = importlib.import_module("train_lm")

    class Killed(train_lm.Training):  # type: ignore[misc, name-defined]  # imported by its path
        def update(self, micro_batches: Any) -> float:
            is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
            if is_first_start and (dist.get_rank(), self.step + 1) == (1, KILLED_IN_STEP):
                os.kill(os.getpid(), signal.SIGKILL)
            return super().update(micro_batches)  # type: ignore[no-any-return]

    train_lm.Training = Killed
    train_lm.main()


if __name__ == "__main__":
    _train_and_die()
