"""The loops of docs/migration.md: equal to one process on all data, and to torch DDP bit by bit."""

import re
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import assert_same_bits

PAGE = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
LOOPS = dict(re.findall(r"^<!-- loop: ([^\n]*) -->\n```diff\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
RANKS, STEPS, MICRO_BATCHES = 2, 6, 2
IN_TOKENS = ("torch DDP, weighted by tokens", "fairseq")
SAME_BITS = (
    "torch DDP",
    "torch DDP, accumulating",
    "torch DDP, require_backward_grad_sync",
    "torch DDP, accumulating without no_sync",
    "torch DDP, a class for the scaler",
    "torch DDP, a rank without data",
    "torch DDP, a GAN",
    "torch DDP, several wrappers",
    "torch DDP, evaluation on one rank",
    "torch DDP, statistics that are averaged",
    "by hand, a flat vector",
    "by hand, per parameter",
    "by hand, a divided loss",
    "by hand, divided by the tokens of all ranks",
    "by hand, weighted by tokens",
    "by hand, with the wrapper",
)
# Those with one model, a call per step, and every batch of `steps` or `batches`.
PLAIN = ("torch DDP", "torch DDP, accumulating", "torch DDP, require_backward_grad_sync", *IN_TOKENS, "apex", "Horovod")
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


def _pairs(rank: int, dtype: torch.dtype) -> list[Batch]:
    """Real data and noise for a GAN."""
    draw = torch.Generator().manual_seed(10 + rank)
    shapes = [(4, 5), (4, 3)] * STEPS
    drawn = iter([torch.randn(*shape, generator=draw).to(dtype) for shape in shapes])
    return list(zip(drawn, drawn, strict=True))


def _run(rank: int, program: str, dtype: torch.dtype) -> State:
    """Weights and buffers of all modules after the program."""
    steps = _steps(rank, dtype)
    torch.manual_seed(1)
    generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 5)).to(dtype)
    modules = {"module": _module(dtype), "discriminator": _module(dtype), "generator": generator}
    batches = list(chain(*steps))
    names: dict[str, Any] = {
        "torch": torch,
        "dist": dist,
        "mse_loss": mse_loss,
        "clip_grad_norm_": clip_grad_norm_,
        "process_group": dist.group.WORLD,
        **modules,
        "normalized": nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)).to(dtype),
        "steps": steps,
        "batches": batches,
        "padded": batches if rank == 0 else [*batches[:-3], None, None, None],
        "pairs": _pairs(rank, dtype),
        "bce_loss": binary_cross_entropy_with_logits,
        "losses": [],
    }
    exec(compile(program, "docs/migration.md", "exec"), names)
    found = {name: value for name, value in names.items() if isinstance(value, nn.Module)}
    return {f"{name}.{key}": value for name, module in found.items() for key, value in module.state_dict().items()}


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
    return {f"module.{key}": value for key, value in module.state_dict().items()}


def test_every_plain_loop_of_ours_ends_where_one_process_on_all_data_does() -> None:
    ours = [_half(LOOPS[name], "+") for name in PLAIN]
    assert {*LOOPS} == {*PLAIN, *SAME_BITS}
    assert all(program.count(".all_reduce(") == 1 for program in ours)

    results = run_ranks(partial(_run_all, programs=ours, dtype=torch.float64), RANKS)

    expected = {
        name: _alone(torch.float64, accumulates=name != "torch DDP", is_sum=name in IN_TOKENS) for name in PLAIN
    }
    for states in results:
        found = {name: {key: state[key] for key in expected[name]} for name, state in zip(PLAIN, states, strict=True)}
        # Ten digits: additions in another order, through AdamW, and nothing else.
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_the_loops_of_torch_ddp_and_ours_end_in_the_same_bits() -> None:
    programs = [_half(LOOPS[name], sign) for name in SAME_BITS for sign in "-+"]

    for states in run_ranks(partial(_run_all, programs=programs, dtype=torch.float32), RANKS):
        before = _run(0, "", torch.float32)
        for name, theirs, ours in zip(SAME_BITS, states[::2], states[1::2], strict=True):
            assert_same_bits({key: ours[key] for key in theirs}, theirs, name)
            assert any(not torch.equal(ours[key], before[key]) for key in before), name


def test_a_gan_with_one_call_for_two_backward_passes_and_weights_by_tokens_differ_by_rounding_alone() -> None:
    theirs, ours = (_half(LOOPS["torch DDP, a GAN"], sign) for sign in "-+")
    once = ours.replace("    netD.all_reduce()\n", "", 1)
    assert (ours.count("netD.all_reduce()"), once.count("netD.all_reduce()")) == (2, 1)
    weighted = [_half(LOOPS["torch DDP, weighted by tokens"], sign) for sign in "-+"]

    for gan, of_gan, tokens, of_tokens in run_ranks(
        partial(_run_all, programs=[theirs, once, *weighted], dtype=torch.float64), RANKS
    ):
        torch.testing.assert_close((of_gan, of_tokens), (gan, tokens), rtol=1e-10, atol=1e-10)


def _save_and_compare(rank: int, folder: str) -> list[str]:
    """The two blocks of the page, on two runs that end alike, and then on one that does not."""
    section = PAGE.partition("### Compare with torch DDP")[2]
    save, compare = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[:2]
    outcomes = []
    for weight in (1.0, 1.0 + 1e-7):
        for name in ("torch", "legacy"):
            module = _module(torch.float32)
            model = (DistributedDataParallel if name == "torch" else LegacyDistributedDataParallel)(module)
            optimizer = torch.optim.AdamW(model.parameters())
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step() if name == "torch" else (model.all_reduce(), optimizer.step())
            if name == "legacy":
                module[0].bias.data[0] *= weight
            source = save.replace('name = "torch"', f'name = "{folder}/{name}"')
            exec(compile(source, "docs/migration.md", "exec"), {"torch": torch, "model": model, "optimizer": optimizer})
        dist.barrier()
        try:
            paths = compare.replace('("torch", "legacy")', f'("{folder}/torch", "{folder}/legacy")')
            exec(compile(paths, "docs/migration.md", "exec"), {"torch": torch})
            outcomes.append("equal")
        except AssertionError as error:
            outcomes.append(str(error))
        dist.barrier()
    return outcomes


def test_the_comparison_of_the_page_finds_a_single_bit(tmp_path: Path) -> None:
    for same, other in run_ranks(partial(_save_and_compare, folder=str(tmp_path)), 2):
        assert same == "equal"
        assert "model" in other
        assert "0.bias" in other


def test_the_step_from_torch_ddp_is_three_lines_and_the_lines_of_the_others_are_python() -> None:
    assert LOOPS["torch DDP"].count("\n+") == 3
    for name, loop in LOOPS.items():
        compile(_half(loop, "-"), name, "exec")
