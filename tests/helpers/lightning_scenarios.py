"""Many trainings by one pair of processes, and what they left, for a test to read.

Starting Lightning takes seconds, so a script runs story after story, each under several strategies, and every rank
leaves a file for each.
"""

import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import logged_warnings
from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_ranks, fork_script

Result = dict[str, Any]
Story = Callable[[str, Path], Result]
RANKS = 2
# Not pytest.importorskip(): importing Lightning costs seconds in each worker that collects tests.
needs_lightning = pytest.mark.skipif(find_spec("lightning") is None, reason="needs the extra legacy_ddp[lightning]")
# Stories in which ranks have other weights on purpose.
_WARNED = {"adversaries", "configured", "local_sgd", "without_data"}
LOADED = ("lightning.pytorch", "lightning.fabric")  # in processes whose start is not what is tested
QUIET = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def run_stories(stories: Mapping[Story, Sequence[str]]) -> None:
    """The scripts' main: ``SCRIPT FOLDER [STORY ...]``. A story in which the library warns has failed."""
    logged_warnings.listen()
    folder, names = Path(sys.argv[1]), sys.argv[2:]
    for story, strategies in stories.items():
        if names and story.__name__ not in names:
            continue
        for strategy in strategies:
            try:
                result = story(strategy, folder)
            except Exception:  # noqa: BLE001 - the test of this story shows it, the others go on
                result = {"failed": traceback.format_exc()}
            if (said := logged_warnings.take()) and story.__name__ not in _WARNED:
                result = {"failed": f"warned of: {said}"}
            torch.save(result, folder / f"{story.__name__}-{strategy}-{torch.distributed.get_rank()}.pt")


@cache
def by_trainer(*stories: str) -> Callable[..., list[Result]]:
    """What all stories of the Trainer left, or those: a job that is started once, of ranks that Lightning starts."""
    return _run(partial(fork_script, forks_children=True, preloaded=LOADED), "lightning_jobs.py", stories)


@cache
def by_fabric(*stories: str) -> Callable[..., list[Result]]:
    """What all stories of Fabric left, or those: a job that is started once, by torchrun."""
    return _run(partial(fork_ranks, RANKS), "fabric_jobs.py", stories)


def _run(start: Callable[..., Any], script: str, stories: Sequence[str]) -> Callable[..., list[Result]]:
    folder = tempfile.TemporaryDirectory()  # as long as what is returned
    result = start(str(ROOT / "tests" / "helpers" / script), folder.name, *stories)
    assert result.returncode == 0, result.stderr
    return partial(told, folder)


def told(folder: tempfile.TemporaryDirectory[str], story: str, strategy: str = "legacy_ddp") -> list[Result]:
    """What the ranks left, in their order."""
    paths = [Path(folder.name) / f"{story}-{strategy}-{rank}.pt" for rank in range(RANKS)]
    results = [torch.load(path, weights_only=False) for path in paths]
    for result in results:
        assert "failed" not in result, result["failed"]
    return results
