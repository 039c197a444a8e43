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

pytest.register_assert_rewrite("tests.helpers.shared_jobs")  # it compares the results of tests

from tests.helpers import devices, hosts, logged_warnings, tiers, transports  # noqa: E402
from tests.helpers.transports import _transport_of_the_test, transport  # noqa: E402, F401 - fixtures

# No deadline: a shared machine makes any example slow once in a while.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")
settings.register_profile("quick", deadline=None, max_examples=25)


# Helpers that start processes.
_STARTERS = frozenset(
    f"tests.helpers.{name}" for name in ("browser", "forked_children", "hosts", "rank_pool", "scripts")
)


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a device that is not there, before any test; choose the number of examples of properties.

    CI runs no property a second time, so it keeps the full number.
    """
    if "not thorough" in config.getoption("markexpr") and not os.environ.get("CI"):
        settings.load_profile("quick")
    if devices.CHOSEN and (why := devices.missing(devices.CHOSEN)):
        raise pytest.UsageError(f"DEVICE={devices.CHOSEN}: {why}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests marked ``soak`` outside of ``make soak``, skip tests marked ``gpu`` or ``hosts`` where there is no
    CUDA device, or where no hosts can be built, and mark tests ``fast`` whose file starts no processes.

    Files with a test marked ``slow`` come first: a worker that begins a long file last keeps the others waiting.
    """
    left_out = [] if tiers.SOAK else [item for item in items if item.get_closest_marker("soak")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]
    long_files = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in long_files)
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))
        if item.get_closest_marker("hosts") and (why := hosts.reason_not_permitted()):
            item.add_marker(pytest.mark.skip(reason=why))
        if isinstance(item, pytest.Function) and not _starts_processes(item.module.__name__):
            item.add_marker(pytest.mark.fast)


@cache
def _starts_processes(name: str) -> bool:
    """Whether the module imports ``subprocess`` or a helper that starts processes, itself or through other helpers."""
    module = sys.modules[name]
    values = list(vars(module).values())
    helpers = {
        value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "") for value in values
    }
    others = {helper for helper in helpers - {name} if helper and helper.startswith("tests.helpers.")}
    return (
        any(value is subprocess for value in values) or bool(others & _STARTERS) or any(map(_starts_processes, others))
    )


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


@pytest.fixture(scope="module")
def alone_in_module() -> Iterator[None]:
    """The same group for all tests of a file, and for all examples of a property."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
