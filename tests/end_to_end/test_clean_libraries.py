"""No warning and no error in healthy trainings by Lightning and accelerate, with default settings."""

import json
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_ranks
from tests.helpers.tiers import thorough_but

LOOPS = (
    "lightning",
    "lightning, clipped, two micro-batches",
    "lightning, clipped by value",
    "lightning in fp16",
    "accelerate",
)


@pytest.mark.parametrize("loop", thorough_but(["lightning, clipped, two micro-batches"], LOOPS))
def test_nothing_is_said_of_a_healthy_training_by_a_library(loop: str, tmp_path: Path) -> None:
    library = loop.split(",")[0].split()[0]
    pytest.importorskip(library, reason=f"needs {library}")
    result = fork_ranks(2, str(ROOT / "tests" / "helpers" / "clean_library_jobs.py"), str(tmp_path), loop)

    assert result.returncode == 0, result.stderr
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[], []]
