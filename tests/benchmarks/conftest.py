"""Tests of the scripts are thorough; long ones run with ``make soak`` alone. Those of figures on pages run always."""

from pathlib import Path

import pytest

# ``test_bench_scripts`` runs these scripts briefly.
_LONG = ("test_bench_hosts.py", "test_bench_memory.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.name.startswith("test_bench_"):
            item.add_marker(pytest.mark.soak if item.path.name in _LONG else pytest.mark.thorough)
