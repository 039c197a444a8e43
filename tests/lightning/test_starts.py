"""Ways to start ranks (script, spawn, fork, torchrun, SLURM): all train alike."""

import socket
from pathlib import Path

import pytest
import torch

from tests.helpers.lightning_scenarios import LOADED, RANKS, by_fabric, by_trainer, needs_lightning
from tests.helpers.paths import ROOT
from tests.helpers.scripts import assert_same_bits, fork_script, fork_scripts

pytestmark = needs_lightning

STARTS = str(ROOT / "tests" / "helpers" / "lightning_starts.py")


def _expected(framework: str) -> dict[str, torch.Tensor]:
    """What strategy ``ddp`` leaves on rank 0 of a Trainer's job that Lightning starts, of Fabric's by torchrun."""
    told = by_trainer("accumulating") if framework == "trainer" else by_fabric("accumulating", "by_trainer")
    return told("accumulating", "ddp")[0]["state"]


def _assert_left(folder: Path, *names: str) -> None:
    assert sorted(path.stem for path in folder.iterdir()) == sorted(names)
    for name in names:
        assert_same_bits(torch.load(folder / f"{name}.pt", weights_only=True), _expected(name.partition("-")[0]), name)


@pytest.mark.thorough
def test_a_trainer_under_torchrun_leaves_the_weights_of_a_trainer_that_starts_its_own_ranks() -> None:
    told = by_fabric("accumulating", "by_trainer")
    assert_same_bits(told("by_trainer")[0]["state"], _expected("trainer"))


@pytest.mark.thorough
def test_forked_or_spawned_ranks_leave_their_weights_to_the_starting_process(tmp_path: Path) -> None:
    names = "trainer=legacy_ddp_fork", "fabric=legacy_ddp_fork", "trainer=legacy_ddp_spawn"

    result = fork_script(STARTS, str(tmp_path), *names, preloaded=LOADED)

    assert result.returncode == 0, result.stderr
    _assert_left(tmp_path, *(name.replace("=", "-") for name in names))


@pytest.mark.thorough
def test_ranks_that_slurm_has_started_find_each_other_and_leave_no_process_group(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
    command = (STARTS, str(tmp_path), "trainer=legacy_ddp", "fabric=legacy_ddp")
    runs = fork_scripts([command] * RANKS, [_set_by_slurm(rank, port) for rank in range(RANKS)], preloaded=LOADED)
    outputs = [run.stdout + run.stderr for run in runs]

    assert [run.returncode for run in runs] == [0] * RANKS, outputs
    assert ["process group at exit: False" in output for output in outputs] == [True] * RANKS, outputs
    _assert_left(tmp_path, "trainer-legacy_ddp", "fabric-legacy_ddp")


def _set_by_slurm(rank: int, port: int) -> dict[str, str]:
    slurm = {
        "JOB_ID": "1",
        "JOB_NAME": "train",
        "LOCALID": str(rank),
        "NODEID": "0",
        "NODELIST": "127.0.0.1",
        "NTASKS": str(RANKS),
        "NTASKS_PER_NODE": str(RANKS),
        "PROCID": str(rank),
    }
    variables = {f"SLURM_{name}": value for name, value in slurm.items()}
    return {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
