"""Segments: anonymous files in memory, and what forked children have in their place, whatever fails."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from legacy_ddp._memory.layout import distinct, plan_layout
from legacy_ddp._memory.segment import Segment, SegmentPolicy
from legacy_ddp._settings import Settings
from tests.helpers import fork_faults, tiers
from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_scripts, run_script

PAGE = os.sysconf("SC_PAGESIZE")


def test_a_kept_segment_is_private_also_in_the_parent() -> None:
    """Its descriptor is closed. A copy in each child took time, and failed from 2 GiB on."""
    before = len(os.listdir("/proc/self/fd"))
    memory = Segment(3 * PAGE + 5).memory
    memory[:PAGE], memory[PAGE:] = 5, 7

    assert len(os.listdir("/proc/self/fd")) == before
    assert f"{memory.data_ptr():x}" not in re.findall("([0-9a-f]+)-[0-9a-f]+ rw-s", Path("/proc/self/maps").read_text())
    assert memory.unique().tolist() == [5, 7]


def test_a_segment_that_a_child_inherited_is_no_memory_to_share_there() -> None:
    """Other ranks would have written to the gradients of its parent."""
    (bucket,) = plan_layout(distinct([("weight", nn.Parameter(torch.zeros(3)))]), Settings()).buckets
    policy, segment = SegmentPolicy(), Segment(PAGE)
    policy.wanted = True
    child = os.fork()
    if child == 0:
        os._exit(policy.fits(bucket, segment))
    assert policy.fits(bucket, segment)
    assert os.waitpid(child, 0)[1] == 0


_OLD_C_LIBRARY = """
import fcntl, os
del os.memfd_create, os.MFD_CLOEXEC, os.MFD_ALLOW_SEALING
for name in [name for name in vars(fcntl) if name.startswith("F_SEAL") or name == "F_ADD_SEALS"]:
    delattr(fcntl, name)
from legacy_ddp._memory.segment import Segment
segment = Segment(10)
segment.memory.fill_(3)
try:
    os.ftruncate(segment.descriptor, 20)
except PermissionError:
    print("sealed", os.pread(segment.descriptor, 10, 0))
"""


def test_a_python_that_does_not_know_memfd_create_makes_segments() -> None:
    """Some builds of Python were made with an old C library: the import failed with an AttributeError."""
    run = run_script("-c", _OLD_C_LIBRARY)
    assert (run.stdout.strip(), run.stderr) == (f"sealed {bytes([3] * 10)}", "")


# Forks of a process with shared memory: every program runs in a process of its own

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
