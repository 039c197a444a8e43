"""Forks of a process with shared memory, whatever fails: every program runs in a process of its own."""

import pytest

from tests.helpers import fork_faults, tiers
from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_scripts

# Programs whose children end with a text, and this text.
TOLD = {
    "no_address_space": "could not be mapped: got [Errno 12] mmap of 65541 bytes: Cannot allocate memory",
    "failing_function": "ends here: the reason",
    "limit_of_recursion": "RecursionError",
}


@pytest.fixture(scope="module")
def runs() -> dict[str, tuple[int, str]]:
    """Exit code and standard error of every program. All at the same time."""
    names, count = list(fork_faults.FAULTS), str(tiers.count(2000, 60))
    program = str(ROOT / "tests" / "helpers" / "fork_faults.py")
    done = fork_scripts([(program, name, count) for name in names], [{}] * len(names))
    return {name: (run.returncode, " ".join(run.stderr.split())) for name, run in zip(names, done, strict=True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", fork_faults.FAULTS)
def test_no_child_writes_to_its_parent_and_no_interrupt_is_lost(runs: dict[str, tuple[int, str]], name: str) -> None:
    """``_make_private`` was interrupted, or raised: Python went on with the memory of the parent."""
    code, errors = runs[name]

    assert code == 0, errors
    assert TOLD.get(name, "") in errors
    assert bool(errors) == (name in TOLD)
