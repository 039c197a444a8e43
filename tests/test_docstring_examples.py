"""Every public class and function shows an example, and the example prints on three ranks what its docstring says."""

import importlib
import tempfile

import pytest
import torch

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.docstring_examples import run_examples
from tests.helpers.ranks import run_ranks

MODULES = ("legacy_ddp", "legacy_ddp.debug", "legacy_ddp.data")
PUBLIC = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]


def _run(rank: int, module: str, name: str) -> tuple[int, str]:
    model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    torch.nn.init.zeros_(model.module.weight)
    names = {name: getattr(importlib.import_module(module), name) for module, name in PUBLIC}
    with tempfile.TemporaryDirectory() as folder:
        names |= {"torch": torch, "rank": rank, "model": model, "inputs": torch.ones(3, 2), "folder": f"{folder}/trace"}
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        return run_examples(names[name], names)


@pytest.mark.parametrize("module, name", PUBLIC)
def test_the_example_of_a_public_name_prints_what_its_docstring_shows(module: str, name: str) -> None:
    for count, failures in run_ranks(_run, 3, module, name):
        assert failures == ""
        assert count > 0, f"{module}.{name} has no example"
