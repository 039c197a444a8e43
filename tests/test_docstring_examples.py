"""The docstring of every public class and function names all arguments and fields. It has an example that prints on
three ranks what the docstring shows; docs/errors.md has the examples of the errors."""

import dataclasses
import importlib
import inspect
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.docstring_examples import run_examples
from tests.helpers.shared_jobs import once, run_cases

MODULES = ("legacy_ddp", "legacy_ddp.debug", "legacy_ddp.data")
PUBLIC = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]


def _is_error(module: str, name: str) -> bool:
    owner = getattr(importlib.import_module(module), name)
    return isinstance(owner, type) and issubclass(owner, Exception)


WITH_EXAMPLE = [(module, name) for module, name in PUBLIC if not _is_error(module, name)]


def _run(rank: int, module: str, name: str) -> tuple[int, str]:
    model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
    torch.nn.init.zeros_(model.module.weight)
    names = {name: getattr(importlib.import_module(module), name) for module, name in PUBLIC}
    with tempfile.TemporaryDirectory() as folder:
        names |= {"torch": torch, "rank": rank, "model": model, "inputs": torch.ones(3, 2), "folder": f"{folder}/trace"}
        names["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        return run_examples(names[name], names)


@once
def _printed() -> dict[str, list[tuple[int, str]]]:
    return run_cases(_run, 3, {f"{module}.{name}": (module, name) for module, name in WITH_EXAMPLE})


@pytest.mark.parametrize("module, name", WITH_EXAMPLE)
def test_the_example_of_a_public_name_prints_what_its_docstring_shows(module: str, name: str) -> None:
    for count, failures in _printed()[f"{module}.{name}"]:
        assert failures == ""
        assert count > 0, f"{module}.{name} has no example"


def _described(owner: Any) -> Iterator[tuple[Any, set[str]]]:
    """A public class or function with its public methods, each with the names of its arguments, or of its fields."""
    if dataclasses.is_dataclass(owner):
        yield owner, {field.name for field in dataclasses.fields(owner)}
    elif not (isinstance(owner, type) and issubclass(owner, Exception)):
        yield owner, set(inspect.signature(owner).parameters)
    for name, item in vars(owner).items() if isinstance(owner, type) else ():
        if not name.startswith(("_", "see_")) and (inspect.isroutine(item) or isinstance(item, property)):
            yield item, set(inspect.signature(item).parameters) if inspect.isfunction(item) else set()


# Arguments of the module, arguments that raise an error, and the evidence behind other fields.
_WITHOUT_WORDS = {"self", "args", "kwargs", "verdict"}


@pytest.mark.parametrize("module, name", PUBLIC)
def test_a_public_name_has_a_docstring_of_its_own_with_every_argument_and_field(module: str, name: str) -> None:
    for item, arguments in _described(getattr(importlib.import_module(module), name)):
        text = inspect.cleandoc(item.__doc__ or "")
        assert text, item
        assert not text.startswith(f"{name}("), "a dataclass wrote it, nobody else did"
        listed = re.findall(r"^ *(\w+(?:, \w+)*):", text, re.MULTILINE)
        named = {*re.findall(r"``(\w+)``", text), *", ".join(listed).split(", ")}
        public = {argument for argument in arguments if not argument.startswith("_")}

        assert public - named <= _WITHOUT_WORDS, item
