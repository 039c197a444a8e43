"""The loops of docs/migration.md: equal to one process on all data, and to torch DDP bit by bit."""

import re
from functools import partial
from itertools import chain
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import assert_same_bits

PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
LOOPS = dict(re.findall(r"^<!-- loop: ([^\n]*) -->\n```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
RANKS, STEPS, MICRO_BATCHES = 2, 6, 2
IN_TOKENS = ("torch DDP, weighted by tokens", "fairseq")
State = dict[str, torch.Tensor]
Batch = tuple[torch.Tensor, torch.Tensor]


def _half(loop: str, sign: str) -> str:
    """The program of one side: its own lines, and those of both."""
    return "\n".join(line[1:] for line in loop.splitlines() if line[:1] in (" ", sign, ""))


def _module(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)).to(dtype)


def _steps(rank: int, dtype: torch.dtype) -> list[list[Batch]]:
    """Ranks differ in data and in batch sizes."""
    draw = torch.Generator().manual_seed(rank)
    sizes = [[3 + rank, 2] for _ in range(STEPS)]
    return [
        [(torch.randn(n, 5, generator=draw).to(dtype), torch.randn(n, 1, generator=draw).to(dtype)) for n in step]
        for step in sizes
    ]


def _run(rank: int, program: str, dtype: torch.dtype) -> State:
    steps = _steps(rank, dtype)
    module = _module(dtype)
    names: dict[str, Any] = {
        "torch": torch,
        "dist": dist,
        "mse_loss": mse_loss,
        "clip_grad_norm_": clip_grad_norm_,
        "process_group": dist.group.WORLD,
        "module": module,
        "steps": steps,
        "batches": list(chain(*steps)),
    }
    exec(compile(program, "docs/migration.md", "exec"), names)
    return module.state_dict()


def _run_all(rank: int, programs: list[str], dtype: torch.dtype) -> list[State]:
    return [_run(rank, program, dtype) for program in programs]


def _alone(dtype: torch.dtype, *, accumulates: bool, is_sum: bool) -> State:
    """One process that sees what all ranks see."""
    per_rank = [_steps(rank, dtype) for rank in range(RANKS)]
    if not accumulates:
        per_rank = [[[batch] for batch in chain(*steps)] for steps in per_rank]
    module = _module(dtype)
    optimizer = torch.optim.AdamW(module.parameters())
    for of_ranks in zip(*per_rank, strict=True):
        micro_batches = list(chain(*of_ranks))
        optimizer.zero_grad()
        for inputs, targets in micro_batches:
            loss = mse_loss(module(inputs), targets, reduction="sum" if is_sum else "mean")
            (loss / (sum(len(inputs) for inputs, _ in micro_batches) if is_sum else RANKS)).backward()
        clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
    return module.state_dict()


def test_every_loop_of_ours_ends_where_one_process_on_all_data_does() -> None:
    ours = [_half(loop, "+") for loop in LOOPS.values()]
    assert list(LOOPS) == ["torch DDP", "torch DDP, accumulating", *IN_TOKENS, "apex", "Horovod"]
    assert all(program.count(".all_reduce(") == 1 for program in ours)

    results = run_ranks(partial(_run_all, programs=ours, dtype=torch.float64), RANKS)

    expected = {
        name: dict(_alone(torch.float64, accumulates=name != "torch DDP", is_sum=name in IN_TOKENS)) for name in LOOPS
    }
    for states in results:
        # Ten digits: additions in another order, through AdamW, and nothing else.
        torch.testing.assert_close(dict(zip(LOOPS, map(dict, states), strict=True)), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["torch DDP", "torch DDP, accumulating"])
def test_the_loops_of_torch_ddp_and_ours_end_in_the_same_bits(name: str) -> None:
    programs = [_half(LOOPS[name], sign) for sign in "-+"]

    for theirs, ours in run_ranks(partial(_run_all, programs=programs, dtype=torch.float32), RANKS):
        assert_same_bits(ours, theirs)


def test_the_loops_weighted_by_tokens_end_in_the_same_weights_up_to_rounding() -> None:
    programs = [_half(LOOPS["torch DDP, weighted by tokens"], sign) for sign in "-+"]

    for theirs, ours in run_ranks(partial(_run_all, programs=programs, dtype=torch.float64), RANKS):
        torch.testing.assert_close(dict(ours), dict(theirs), rtol=1e-10, atol=1e-10)


def test_the_step_from_torch_ddp_is_three_lines() -> None:
    changed = [line for line in LOOPS["torch DDP"].splitlines() if line.startswith("+")]

    assert len(changed) == 3


def test_the_lines_of_the_others_are_python() -> None:
    for name, loop in LOOPS.items():
        compile(_half(loop, "-"), name, "exec")
