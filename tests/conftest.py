"""What holds for every test: reproducible examples in CI, and skipping what needs a GPU."""

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch._C._distributed_c10d import HashStore

from tests.helpers import logged_warnings

# No deadline: a shared machine makes any example slow once in a while.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None)
settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch sees none"))


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
