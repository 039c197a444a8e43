"""Do the loops of accelerate and transformers train with all_reduce() as under their own DDP, to the bit?"""

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.paths import python_blocks
from tests.helpers.scripts import EXAMPLES, assert_same_bits, example, fork_torchrun

ACCELERATE, IN_TOKENS, TRANSFORMERS = python_blocks("docs/accelerate.md")
SMALL_DATA = """
import os, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
module = torch.nn.Linear(3, 1)
loader = DataLoader(TensorDataset(torch.randn(40, 3), torch.randn(40, 1)), batch_size=2)
"""


@pytest.fixture
def sealed(tmp_path: Path) -> dict[str, str]:
    """An environment for programs that may neither phone nor leave anything at home."""
    (tmp_path / "home").mkdir()
    return {"HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def _train_both(script: str, folder: Path, environment: dict[str, str], *arguments: str) -> str:
    """What a script prints that trains with all_reduce() and then under torch DDP, after both left the same bits."""
    from safetensors.torch import load_file

    ways = ("legacy", "torch")
    result = example(2, script, *arguments, "--save", str(folder), "--ddp", *ways, environment=environment)

    assert result.returncode == 0, result.stderr
    assert not list((folder / "home").iterdir())
    assert_same_bits(*(load_file(folder / way / "model.safetensors") for way in ways))
    return result.stdout


@pytest.mark.thorough  # the loop of the page runs in make test
def test_accelerate_trains_to_the_bits_of_its_own_ddp(tmp_path: Path, sealed: dict[str, str]) -> None:
    pytest.importorskip("accelerate", reason="the recipe is for accelerate")
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

    printed = _train_both("accelerate_digits.py", tmp_path, sealed, "--mixed-precision", "bf16", "--epochs", "2")

    accuracies = re.fullmatch(r"legacy ddp: accuracy (\S+)\ntorch ddp: accuracy (\S+)\n", printed)
    assert accuracies is not None, printed  # each is printed once: two ranks, not two trainings of one
    assert accuracies[1] == accuracies[2]
    assert float(accuracies[1]) > 0.5  # guessing is right once in ten


@pytest.mark.thorough
def test_transformers_trains_to_the_bits_of_its_own_ddp(tmp_path: Path, sealed: dict[str, str]) -> None:
    pytest.importorskip("transformers", reason="the recipe is for transformers")

    printed = _train_both("transformers_tiny.py", tmp_path, sealed, "--epochs", "3")

    told = re.findall(r"'(loss|grad_norm|eval_loss)': '(\S+)'", printed)
    assert len(told) == 2 * (2 * 3 + 1)  # each is printed once: two ranks, not two trainings of one
    assert told[:7] == told[7:]
    assert float(told[6][1]) < float(told[0][1]) - 0.3


def test_the_page_s_accelerate_loop_runs_on_two_ranks_and_again_after_load_state(
    tmp_path: Path, sealed: dict[str, str]
) -> None:
    pytest.importorskip("accelerate", reason="the recipe is for accelerate")
    epoch = ACCELERATE[ACCELERATE.index("for inputs") :]
    ask = """
from legacy_ddp.debug import check_replicas
check_replicas(model, raises=True)
open(f"calls-{os.environ['RANK']}", "w").write(str(model.all_reduce(skip=True).call))
"""
    again = f"""
accelerator.save_state("state")
{epoch}
went_on = module.weight.tolist()
accelerator.load_state("state")
assert module.weight.tolist() != went_on
{epoch}
assert module.weight.tolist() == went_on
accelerator.end_training()
"""
    script = tmp_path / "loop.py"
    program = f"{SMALL_DATA}{ACCELERATE}{ask}{again}"
    script.write_text(program.replace('"calls-', f'"{tmp_path}/calls-').replace('"state"', f'"{tmp_path}/state"'))

    result = fork_torchrun(2, str(script), environment={**sealed, "ACCELERATE_USE_CPU": "true"})

    assert result.returncode == 0, result.stderr
    assert "all_reduce() call" not in result.stderr  # no warning
    # 10 micro-batches a rank are steps of 4, 4 and 2; the call that asks is the fourth.
    assert [(tmp_path / f"calls-{rank}").read_text() for rank in range(2)] == ["4", "4"]


@pytest.mark.thorough
def test_the_page_s_loop_weighted_by_tokens_is_that_of_one_process(tmp_path: Path, sealed: dict[str, str]) -> None:
    pytest.importorskip("accelerate", reason="the recipe is for accelerate")
    preparation = ACCELERATE[: ACCELERATE.index("for inputs")]
    # Windows of 4, 4 and 2 micro-batches on each of two ranks, two rows in each.
    alone = """
rows = loader.dataset
alone = torch.nn.Linear(3, 1)
alone.load_state_dict(module.state_dict())
slow = torch.optim.AdamW(alone.parameters())
for first, last in ((0, 16), (16, 32), (32, 40)):
    inputs, targets = rows[first:last]
    slow.zero_grad()
    torch.nn.functional.mse_loss(alone(inputs), targets).backward()
    slow.step()
"""
    compare = """
torch.testing.assert_close(module.weight, alone.weight, rtol=1e-12, atol=1e-12)
torch.testing.assert_close(module.bias, alone.bias, rtol=1e-12, atol=1e-12)
accelerator.end_training()
"""
    script = tmp_path / "loop.py"
    script.write_text(
        f"import torch\ntorch.set_default_dtype(torch.float64)\n{SMALL_DATA}{alone}{preparation}{IN_TOKENS}{compare}"
    )

    result = fork_torchrun(2, str(script), environment={**sealed, "ACCELERATE_USE_CPU": "true"})

    assert result.returncode == 0, result.stderr


@pytest.mark.thorough
def test_a_training_of_transformers_goes_on_from_its_checkpoint_to_the_same_bits(
    tmp_path: Path, sealed: dict[str, str]
) -> None:
    pytest.importorskip("transformers", reason="the recipe is for transformers")
    script = tmp_path / "resume.py"
    script.write_text(
        f"""
import sys, torch
sys.path.insert(0, {str(EXAMPLES)!r})
from transformers_tiny import make_trainer
from transformers.trainer_utils import SaveStrategy
trainers = [make_trainer({str(tmp_path)!r}, 2, 4, torch_ddp=False) for _ in range(2)]
trainers[0].args.save_strategy = SaveStrategy.EPOCH
trainers[0].train()
trainers[1].train(resume_from_checkpoint={str(tmp_path / "checkpoint-4")!r})
whole, resumed = (trainer.model.state_dict() for trainer in trainers)
assert all(torch.equal(whole[name], resumed[name]) for name in whole)
assert trainers[1].model_wrapped.all_reduce(skip=True).call == 5  # after four steps, and not after eight
torch.distributed.destroy_process_group()
"""
    )

    result = fork_torchrun(2, str(script), environment=sealed)

    assert result.returncode == 0, result.stderr


def test_the_page_s_trainer_is_that_of_the_example() -> None:
    source = (EXAMPLES / "transformers_tiny.py").read_text(encoding="utf-8")
    trainer = re.search(r"^class LegacyDDPTrainer.*?(?=\n\n\n)", source, re.MULTILINE | re.DOTALL)

    assert trainer is not None
    assert _statements(trainer[0]) == _statements(TRANSFORMERS)


def _statements(source: str) -> list[str]:
    """The methods of a class without annotations, comments and docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
    (trainer,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return [ast.unparse(node) for node in trainer.body if isinstance(node, ast.FunctionDef)]
