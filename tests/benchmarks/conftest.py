"""What ``make test`` leaves out: the tests of the scripts. Those of the figures on pages run always."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name.startswith("test_bench_"):
            item.add_marker(pytest.mark.thorough)
