"""Settings for every test: reproducible examples in CI, skipping without a GPU, and the mark of quick tests."""

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch._C._distributed_c10d import HashStore

from tests.helpers import logged_warnings, transports
from tests.helpers.transports import _transport_of_the_test, transport  # noqa: F401 - fixtures

# No deadline: a shared machine makes any example slow once in a while.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")


# Tests of programs: examples, benchmarks, pages and Lightning, and of the helpers that start them.
_PROGRAM_FOLDERS = ("tests/end_to_end/", "tests/lightning/", "tests/benchmarks/", "tests/helpers/")


def _helpers(*names: str) -> frozenset[str]:
    return frozenset(f"tests.helpers.{name}" for name in names)


_PROGRAM_STARTERS = _helpers("forked_children", "forked_scripts", "hosts", "namespaces", "scripts")
_STARTERS = _PROGRAM_STARTERS | _helpers("browser", "rank_pool")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is no CUDA device; mark tests ``fast`` whose file starts no processes, and
    ``program`` whose file starts whole programs.

    Long tests come first: a worker that begins a long file last keeps the others waiting.
    """
    items.sort(key=lambda item: not (item.path.name == "test_stress.py" or item.nodeid.startswith(_PROGRAM_FOLDERS)))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
        if not isinstance(item, pytest.Function):
            continue
        if not _starts(item.module.__name__, _STARTERS):
            item.add_marker(pytest.mark.fast)
        elif item.nodeid.startswith(_PROGRAM_FOLDERS) and _starts(item.module.__name__, _PROGRAM_STARTERS):
            item.add_marker(pytest.mark.program)


@cache
def _starts(name: str, starters: frozenset[str]) -> bool:
    """Whether the module imports ``subprocess`` or one of the helpers ``starters``, itself or through other helpers."""
    module = sys.modules[name]
    values = list(vars(module).values())
    helpers = {
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") for value in values
    }
    others = {helper for helper in helpers - {name} if helper and helper.startswith("tests.helpers.")}
    return subprocess in values or bool(others & starters) or any(_starts(other, starters) for other in others)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the tests of ranks on both transports."""
    transports.parametrize(metafunc)


@pytest.fixture(autouse=True)
def _no_warning_is_only_logged() -> Iterator[None]:
    """A warning of the library is an error in a test, although the library logs it instead of raising it."""
    logged_warnings.listen()
    yield
    logged_warnings.assert_nothing_left()


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this one process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
