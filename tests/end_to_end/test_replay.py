"""Does the main job end in the same bits on any number of ranks, and does a mistake show?"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import ROOT, python_blocks
from tests.helpers.scripts import EXAMPLES, assert_same_bits, example, fork_script, load

REPRODUCIBLE = ("--reproducible", "--micro-batches", "4", "--batch-size", "2", "--held-out", "256")


def test_the_page_s_loop_ends_in_the_same_weights_on_1_and_on_4_ranks(tmp_path: Path) -> None:
    (loop,) = python_blocks("docs/reproducible.md")
    script = tmp_path / "train.py"
    script.write_text(loop + "\nimport os, sys\ntorch.save(module.state_dict(), sys.argv[1] + os.environ['RANK'])\n")
    for world_size in (1, 4):
        result = example(world_size, str(script), str(tmp_path / f"{world_size}-"))
        assert result.returncode == 0, result.stderr

    for rank in range(4):
        assert_same_bits(load(tmp_path / "1-0"), load(tmp_path / f"4-{rank}"))


@pytest.mark.thorough
def test_replay_finds_equal_weights_and_then_the_mistake() -> None:
    result = fork_script(str(EXAMPLES / "replay.py"), "--steps", "3", "--micro-batches", "2", forks_children=True)

    assert result.returncode == 0, result.stdout + result.stderr
    hashes = [line.split()[-1] for line in result.stdout.splitlines() if "bits/byte, weights" in line]
    assert len(hashes) == 3
    assert hashes[0] == hashes[1] != hashes[2]
    assert f"the same weights, bit for bit: {hashes[0]}" in result.stdout
    assert result.stdout.splitlines()[-1] == "FOUND"
    assert max(map(len, result.stdout.splitlines())) <= 88


@pytest.mark.thorough
def test_replay_of_a_training_that_depends_on_the_ranks_fails(tmp_path: Path) -> None:
    """So that the test above can fail: dropout that follows from the rank."""
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        if path.name == "train_lm.py":
            seeded = ", micro_batch_rng(self.step, number, seed=self.seed)"
            assert seeded in text
            text = text.replace(seeded, "")
        (tmp_path / path.name).write_text(text)

    result = fork_script(str(tmp_path / "replay.py"), "--steps", "1", "--micro-batches", "2", forks_children=True)

    assert result.returncode == 1
    assert "DIFFERENT WEIGHTS" in result.stdout
    assert "different: runs part at step 1" in result.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--micro-batches", "1"), "--micro-batches cannot be split: got 1, expected 2 or more"),
        (("--keep", str(ROOT)), f"--keep folder exists: got {ROOT}, expected a new one"),
    ],
)
def test_replay_refuses_what_it_cannot_do(arguments: tuple[str, ...], message: str) -> None:
    result = fork_script(str(EXAMPLES / "replay.py"), *arguments)

    assert result.returncode == 2
    assert message in result.stderr


@pytest.mark.thorough
def test_a_reproducible_training_resumes_to_the_same_bits_on_another_number_of_ranks(tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    runs = ((1, whole, "--steps=4"), (2, resumed, "--steps=2"), (1, resumed, "--steps=4", "--resume"))
    for world_size, folder, *options in runs:
        arguments = (*REPRODUCIBLE, *options, "--save", str(folder), "--save-every", "2")
        result = example(world_size, "train_lm.py", *arguments)
        assert result.returncode == 0, result.stderr

    states = [load(folder / "step-00000004.pt") for folder in (whole, resumed)]
    for state in states:
        del state["random"]  # each rank's own, which is not used
    assert_same_bits(*states)


def test_a_recorder_takes_what_all_micro_batches_of_a_rank_add_up_to(tmp_path: Path) -> None:
    """So the mistaken rank shows in its local gradients, although ``.grad`` holds none of them."""
    mistake = {"MISTAKE_RANK": "1", "MISTAKE_STEP": "1", "MISTAKE_PARAMETER": "gru.bias_hh_l0"}
    for name, script, environment in (("good", "train_lm.py", {}), ("bad", "_planted.py", mistake)):
        arguments = (*REPRODUCIBLE, "--steps", "1", "--record", str(tmp_path / name))
        result = example(2, script, *arguments, environment=environment)
        assert result.returncode == 0, result.stderr

    told = fork_script("-m", "legacy_ddp", "diff", "--json", str(tmp_path / "good"), str(tmp_path / "bad"))
    first: dict[str, Any] = json.loads(told.stdout)["first"]
    assert (first["step"], first["phase"], first["ranks"]) == (1, "local_gradients", [1])
    assert "gru.bias_hh_l0" in first["name"]
