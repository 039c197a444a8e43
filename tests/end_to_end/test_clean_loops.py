"""No warning and no error in healthy trainings, by default and with ``checks="detail"``; 10,000 steps in a soak."""

import math
from collections.abc import Collection

import pytest

from legacy_ddp import Checks, LegacyDDPError
from tests.helpers import clean_edits, clean_loops, logged_warnings
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import once
from tests.helpers.tiers import count, thorough

LOOPS = {**clean_loops.LOOPS, **clean_edits.LOOPS}
# By default a rotation of digests takes 16 calls; in detail every call compares everything.
STEPS = {"info": count(math.ceil(10_000 / len(LOOPS)), 24), "detail": count(math.ceil(10_000 / len(LOOPS)), 15)}
# With make test: in detail a loop of each kind of state that a rank may hold alone.
IN_DETAIL = (
    *("dropout and statistics", "sparse", "local sgd", "rank 0 looks"),
    *("several optimizers", "joins", "ignores", "skips agreed nan"),
)
RUNS: dict[str, tuple[int, Checks, Collection[str]]] = {
    "by default": (2, Checks(), [*LOOPS]),
    "in detail": (3, Checks("detail"), IN_DETAIL),
    "others in detail": (3, Checks("detail"), [name for name in LOOPS if name not in IN_DETAIL]),
    "every 5": (2, Checks("detail", every=5), IN_DETAIL),
}
THOROUGH = ("others in detail", "every 5")


def _run_all(rank: int, checks: Checks, names: Collection[str]) -> dict[str, list[str]]:
    said = {}
    for name in names:
        try:
            LOOPS[name](rank, checks, STEPS[checks.level])
            said[name] = logged_warnings.take()
        except LegacyDDPError as error:  # on all ranks: the next loop can run
            said[name] = [str(error), *logged_warnings.take()]
    return said


@once
def _said(run: str) -> list[dict[str, list[str]]]:
    world_size, checks, names = RUNS[run]
    return run_ranks(_run_all, world_size, checks, names, timeout_seconds=count(3600, 240))


@pytest.mark.slow
@pytest.mark.parametrize(
    "run, name",
    [thorough(run, name) if run in THOROUGH else (run, name) for run, (*_, names) in RUNS.items() for name in names],
)
def test_nothing_is_said_of_a_healthy_training(run: str, name: str) -> None:
    assert [of_rank[name] for of_rank in _said(run)] == [[]] * RUNS[run][0]
