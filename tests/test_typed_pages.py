"""Types that users see: the examples of the pages under strict type checkers, and the class of ``model.module``."""

import builtins
import re
import symtable
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT, python_blocks
from tests.helpers.scripts import run_script

# What the examples take as given.
GIVEN = """
from collections.abc import Callable
import torch
from legacy_ddp import Checks as Checks, LegacyDistributedDataParallel as LegacyDistributedDataParallel, SyncRecord
from legacy_ddp.debug import check_replicas as check_replicas

Batch = dict[str, torch.Tensor]
batches: list[torch.Tensor]
copies: list[torch.Tensor]
correct: torch.Tensor
cross_entropy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
loader: list[Batch]
loss_of: Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
loss_sum: torch.Tensor
model: LegacyDistributedDataParallel
module: torch.nn.Module
optimizer: torch.optim.Optimizer
record: SyncRecord
run: Callable[[torch.nn.Module, Batch], torch.Tensor]
step: int
tokens: int
weight: float

class scaler:
    loss_scale: float
"""
# What the types of others lack: no mend of a page helps.
EXCUSED = (
    'Call to untyped function "backward" in typed context',
    'Module "torch.distributed" does not explicitly export attribute "HashStore"',
    '"HashStore" is not exported from module "torch.distributed"',
    "is possibly unbound",  # pyright knows no loop that runs at least once
)
# These pages fill in methods of accelerate, transformers and Fabric, whose types decide there.
FOREIGN = ("docs/accelerate.md", "docs/lightning.md")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _examples() -> dict[str, str]:
    """Every Python block of the pages, and every recipe for a metric, as a module, by the name of its file."""
    found = {}
    for page in (page.relative_to(ROOT) for page in PAGES if str(page.relative_to(ROOT)) not in FOREIGN):
        text = (ROOT / page).read_text(encoding="utf-8")
        recipes = [f"print({code})" for code in re.findall(r"`(record\.metrics\[[^`\n]*)`", text)]
        for number, source in enumerate([*python_blocks(page), *recipes]):
            found[re.sub(r"\W", "_", str(page.with_suffix(f".{number}"))) + ".py"] = _module(source)
    return found


def _module(source: str) -> str:
    given = sorted(_given(source) - {"torch"})
    return "\n".join(["import torch", *(f"from given import {name}" for name in given), source])


def _given(source: str) -> set[str]:
    """The names that the source reads, and does not define."""
    top = symtable.symtable(source, "example", "exec")
    tables = [top]
    for table in tables:  # grows
        tables += table.get_children()
    symbols = [symbol for table in tables for symbol in table.get_symbols() if table is top or symbol.is_global()]
    read = {symbol.get_name() for symbol in symbols if symbol.is_referenced()}
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    return read - defined - set(dir(builtins))


def _mypy(folder: Path) -> str:
    """What mypy --strict finds in the files of the folder."""
    pytest.importorskip("mypy", reason="mypy belongs to the extra lint")
    files = map(str, sorted(folder.iterdir()))
    return run_script("-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache"), *files, cwd=ROOT).stdout


def _pyright(folder: Path) -> str:
    """What pyright finds there."""
    pytest.importorskip("pyright", reason="pyright belongs to the extra lint")
    return run_script("-m", "pyright", "--pythonpath", sys.executable, ".", cwd=folder).stdout


_MODULE = """
import copy
from typing import assert_type
import legacy_ddp
from torch import nn
from legacy_ddp import Checks, LegacyDistributedDataParallel
from legacy_ddp.debug import check_replicas

def bare(model: LegacyDistributedDataParallel) -> None:
    assert_type(model.module, nn.Module)

model = LegacyDistributedDataParallel(nn.Linear(2, 1))
assert_type(model.module, nn.Linear)
assert_type(copy.deepcopy(model).module, nn.Linear)
bare(model)  # covariant
assert_type(legacy_ddp.debug.check_replicas(model), legacy_ddp.debug.ReplicaReport)
other: LegacyDistributedDataParallel[nn.Sequential] = LegacyDistributedDataParallel(nn.Sequential())
assert_type(other.module, nn.Sequential)
module = nn.Linear(2, 1)
LegacyDistributedDataParallel(module, checks="detail", transport="gloo").all_reduce(sample_size=module.weight.sum())
check_replicas(module, what=["parameters"])
mean: float = model.all_reduce(metrics={"loss": 1.0}).metrics["loss"]
Checks("off", uneven="raise", nonfinite="warn", divergence="ignore", same_data="allow", unsynchronized_step="allow")
"""
# Each is an error.
_WRONG = """\
other = model
LegacyDistributedDataParallel(module, checks="on")
LegacyDistributedDataParallel(module, transport="nearby")
model.all_reduce(sample_size="3")
check_replicas(module, what=["weights"])
Checks("all")
Checks(uneven="ignore")
Checks(nonfinite="allow")
Checks(divergence="allow")
Checks(same_data="raise")
Checks(unsynchronized_step="warn")
"""


@pytest.fixture(scope="module", params=[_mypy, _pyright])
def errors(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What a type checker says about the examples and the module above."""
    folder = tmp_path_factory.mktemp("typed")
    for name, source in {**_examples(), "given.pyi": GIVEN, "module.py": _MODULE + _WRONG}.items():
        (folder / name).write_text(source)
    return [line for line in request.param(folder).splitlines() if re.search(r"\berror: ", line)]


@pytest.mark.slow
@pytest.mark.thorough
def test_a_type_checker_finds_only_excused_errors_in_the_pages(errors: list[str]) -> None:
    of_examples = [line for line in errors if "module.py:" not in line]

    assert [line for line in of_examples if not any(text in line for text in EXCUSED)] == []
    assert len(_examples()) > 20


@pytest.mark.slow
@pytest.mark.thorough
def test_a_type_checker_knows_the_class_of_the_module_and_refuses_unknown_values(errors: list[str]) -> None:
    wrong = {int(line) for line in re.findall(r"\bmodule\.py:(\d+)", "\n".join(errors))}

    first = len(_MODULE.splitlines()) + 1
    assert wrong == set(range(first, first + len(_WRONG.splitlines()))), errors
