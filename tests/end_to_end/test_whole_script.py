"""examples/whole_script.py: the bits of one process in plain torch, the same bits after a resume and when compiled."""

import importlib
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import EXAMPLES, assert_same_bits, example, load

EPOCHS, BATCH_SIZE, UPDATE_FREQ = 3, 16, 3  # 600 images: the last step of an epoch has fewer micro-batches
SETTINGS = ("--batch-size", str(BATCH_SIZE), "--update-freq", str(UPDATE_FREQ), "--amp")


def _run(path: Path, *arguments: str, epochs: int = EPOCHS) -> subprocess.CompletedProcess[str]:
    end = ("--epochs", str(epochs), "--checkpoint", str(path))
    run = example(2, "whole_script.py", *SETTINGS, *end, *arguments)
    assert (run.returncode, run.stderr) == (0, "")
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """Checkpoint and output of a run on two ranks that nothing interrupted."""
    path = tmp_path_factory.mktemp("whole") / "new folder" / "whole.pt"
    run = _run(path)
    return load(path), run.stdout


def test_the_whole_script_resumes_to_the_same_bits(whole: Any, tmp_path: Path) -> None:
    undisturbed, output = whole
    first = _run(tmp_path / "parts.pt", epochs=1)
    before = load(tmp_path / "parts.pt")

    second = _run(tmp_path / "parts.pt")

    assert_same_bits(load(tmp_path / "parts.pt"), undisturbed)
    assert first.stdout + second.stdout == output
    assert not torch.equal(before["module"]["0.weight"], undisturbed["module"]["0.weight"])


@pytest.mark.thorough
def test_the_whole_script_ends_in_the_same_bits_when_it_is_compiled(whole: Any, tmp_path: Path) -> None:
    uncompiled, output = whole

    run = _run(tmp_path / "compiled.pt", "--compile", "eager")

    assert run.stdout == output
    assert_same_bits(load(tmp_path / "compiled.pt"), uncompiled)


def test_the_whole_script_ends_as_one_process_in_plain_torch_that_reads_the_batches_of_all_ranks(
    tmp_path: Path,
) -> None:
    _run(tmp_path / "ranks.pt", "--dropout", "0")
    found = load(tmp_path / "ranks.pt")

    (expected,) = run_ranks(_alone, 1)

    assert set(expected) < set(found)
    for name, state in expected.items():
        assert_same_bits(found[name], state, name)  # a sum of two has a single rounding


def _alone(rank: int) -> dict[str, Any]:
    """Without legacy_ddp, GradScaler and communication: one process does the work of each rank in turn.

    A micro-batch is the one of the rank, because BatchNorm normalises with the statistics of a micro-batch. The running
    statistics are those of the first share, as the script takes the statistics of rank 0.
    """
    sys.path.append(str(EXAMPLES))
    script = importlib.import_module("whole_script")
    torch.manual_seed(rank)
    module = script.make_module(dropout=0.0)
    ema = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(script.EMA_DECAY))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    data = script.make_data(600, seed=1)
    samplers = [DistributedSampler(data, 2, share, seed=0) for share in range(2)]
    for epoch in range(EPOCHS):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        streams = [iter(DataLoader(data, BATCH_SIZE, sampler=sampler)) for sampler in samplers]
        while any(steps := [list(islice(stream, UPDATE_FREQ)) for stream in streams]):
            _step(module, steps)
            nn.utils.clip_grad_norm_(module.parameters(), script.CLIP_NORM)
            optimizer.step()
            ema.update_parameters(module)
        schedule.step()
    for averaged, current in zip(ema.module.buffers(), module.buffers(), strict=True):
        averaged.copy_(current)
    states = {"module": module, "ema": ema, "optimizer": optimizer, "scheduler": schedule}
    return {name: part.state_dict() for name, part in states.items()}


def _step(module: nn.Module, shares: list[list[list[torch.Tensor]]]) -> None:
    """Leave the mean of the gradients over the images of all shares in ``.grad``."""
    sums = [torch.zeros_like(parameter) for parameter in module.parameters()]
    count = 0
    for share, micro_batches in enumerate(shares):
        before = [buffer.clone() for buffer in module.buffers()]
        module.zero_grad()
        for images, labels in micro_batches:
            with torch.autocast("cpu", torch.bfloat16):
                cross_entropy(module(images), labels, reduction="sum").backward()  # type: ignore[no-untyped-call]
            count += len(labels)
        if share > 0:
            for buffer, value in zip(module.buffers(), before, strict=True):
                buffer.copy_(value)
        sums = [total + parameter.grad for total, parameter in zip(sums, module.parameters(), strict=True)]
    for parameter, total in zip(module.parameters(), sums, strict=True):
        parameter.grad = total / count
