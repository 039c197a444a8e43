"""The examples of pages that are parts of a script run, and the commands of all pages exist, with their options."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import legacy_ddp
from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp.debug import check_replicas
from tests.helpers.command import command
from tests.helpers.paths import ROOT, python_blocks
from tests.helpers.ranks import run_ranks

PARTS = ("docs/debugging.md", "docs/operations.md", "docs/reference.md", "docs/guides/cross-check.md")
PAGES = [*ROOT.glob("*.md"), ROOT / "benchmarks" / "README.md", *(ROOT / "docs").rglob("*.md")]
STEP = "optimizer.zero_grad(); run(model, batch).backward(); model.all_reduce()"  # what an ellipsis stands for
RELEASED = re.compile(r"^## \d.*", re.MULTILINE | re.DOTALL)  # of the changelog: commands of earlier versions


def _run_blocks(rank: int, folder: str) -> None:
    """Run every block with the names that it takes as given."""
    for page in PARTS:
        for block in python_blocks(page):
            source = block.replace('"before"', repr(f"{folder}/before"))
            source = re.sub(r"(?<=^    )\.\.\.", STEP, source, flags=re.MULTILINE)
            exec(compile(source, page, "exec"), _given(rank, block))


def _given(rank: int, block: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    model = LegacyDistributedDataParallel(module)
    generator = torch.Generator().manual_seed(rank)
    loader = [
        {"inputs": torch.randn(4, 3, generator=generator), "targets": torch.randint(2, (4,), generator=generator)}
        for _ in range(100)
    ]

    def run(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return cross_entropy(model(batch["inputs"]), batch["targets"])

    if "model.all_reduce(" in block and "optimizer.step()" not in block:
        run(model, loader[0]).backward()
    return {
        **{name: value for name, value in vars(legacy_ddp).items() if not name.startswith("_")},
        "Checks": Checks,
        "LegacyDistributedDataParallel": LegacyDistributedDataParallel,
        "torch": torch,
        "check_replicas": check_replicas,
        "cross_entropy": cross_entropy,
        "module": module,
        "copies": [parameter.detach().clone() for parameter in module.parameters()],
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": loader,
        "batch": loader[0],
        "run": run,
        "step": 0,
        "tokens": 4,
        "weight": 2.5,
        "scaler": SimpleNamespace(loss_scale=128.0),
        "loss_sum": torch.tensor(2.0),
        "correct": torch.tensor(1.0),
    }


def test_every_example_that_is_a_part_of_a_script_runs(tmp_path: Path) -> None:
    assert [len(python_blocks(page)) for page in PARTS] == [7, 1, 4, 1]

    run_ranks(_run_blocks, 2, str(tmp_path))  # raises the error of a rank


def _divide_behind_copies(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients of the copies of the page, and those of ``sample_size=``, for ranks with 4 and 12 tokens."""
    block = next(block for block in python_blocks("docs/reference.md") if "copies" in block)
    given = {**_given(rank, ""), "tokens": 4 + 8 * rank}
    found = []
    for source in (block, "model.all_reduce(sample_size=tokens)"):
        given["model"].zero_grad()
        cross_entropy(given["model"](torch.full((4, 3), rank + 1.0)), torch.zeros(4, dtype=int)).backward()
        exec(compile(source, "docs/reference.md", "exec"), given)
        held = given["copies"] if source == block else given["module"].parameters()
        found.append([tensor.grad.clone() for tensor in held])
    return found[0], found[1]


def test_a_division_behind_fp32_copies_gives_the_mean_over_tokens() -> None:
    for copies, weighted in run_ranks(_divide_behind_copies, 2):
        torch.testing.assert_close(copies, weighted)
        assert any(grad.any() for grad in weighted)


def _lines() -> Iterator[tuple[str, list[str]]]:
    """The commands of all pages, each with its page: indented lines, and code inside of sentences."""
    for page in PAGES:
        text = RELEASED.sub("", page.read_text(encoding="utf-8")).replace("\\\n", " ")
        for line in re.findall(r"^ {4,}(?:\$ )?((?:python|torchrun|legacy-ddp) .*)$", text, re.MULTILINE):
            yield str(page.relative_to(ROOT)), shlex.split(line.partition(" | ")[0], comments=True)
        for code in re.findall(r"(?<!`)`((?:python|torchrun|legacy-ddp) [^`]*)`", text):
            yield str(page.relative_to(ROOT)), shlex.split(code.partition(" | ")[0], comments=True)


def test_every_script_of_a_command_exists_and_knows_its_options() -> None:
    seen = 0
    for page, words in _lines():
        scripts = [word for word in words if re.fullmatch(r"(benchmarks|examples|tests)/[\w/]+\.py", word)]
        for script in scripts:
            seen += 1
            folder = (ROOT / script).parent
            texts = [path.read_text(encoding="utf-8") for path in [ROOT / script, *folder.glob("_*.py")]]
            for option in [word for word in words[words.index(script) :] if re.fullmatch(r"--[a-z-]+", word)]:
                assert option == "--help" or any(f'"{option}"' in text for text in texts), (page, words)
    assert seen >= 10


def test_every_subcommand_and_its_options_exist() -> None:
    seen = 0
    for page, words in _lines():
        if words[0] != "legacy-ddp" or not (len(words) > 1 and words[1].isalpha()):
            continue
        seen += 1
        told = command(words[1], "--help")
        assert told.returncode == 0, (page, words, told.stderr)
        for option in [word for word in words[2:] if word.startswith("-")]:
            assert option in told.stdout, (page, words)
    assert seen >= 20


@pytest.mark.parametrize("page", [ROOT / ".ci" / "run", *PAGES], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_commands_of_make_are_in_the_makefile(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = RELEASED.sub("", page.read_text(encoding="utf-8"))

    found = set(re.findall(r"(?:`|^ *(?:\$ )?)make ([a-z-]+)(?=`| *$| +#| [A-Z])", text, re.MULTILINE))

    assert found <= targets
