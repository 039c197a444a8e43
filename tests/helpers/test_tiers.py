"""Marks that the collection sets itself: pytest chooses by them."""

import subprocess
import sys

from tests.helpers.paths import ROOT
from tests.helpers.tiers import SOAK


def test_fast_tests_are_found_by_their_mark_and_long_tests_of_scripts_are_left_to_the_soak() -> None:
    """``-m fast`` found 30 tests instead of 870 where marks were set after the choice, and CI passed."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m"]
    files = ["tests/test_message_parts.py", "tests/benchmarks/test_bench_memory.py"]

    def found(marks: str) -> set[str]:
        listed = subprocess.run([*command, marks, *files], cwd=ROOT, capture_output=True, text=True, timeout=120).stdout
        return {line.partition("::")[0] for line in listed.splitlines() if "::" in line}

    assert found("fast") == {files[0]}
    assert found("fast or soak") == {*files[: 1 + SOAK]}
