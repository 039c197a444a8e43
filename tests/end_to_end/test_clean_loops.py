"""No warning and no error in healthy trainings, by default and with ``checks="detail"``; 10,000 steps in a soak."""

import math
from functools import cache

import pytest

from legacy_ddp import Checks, LegacyDDPError
from tests.helpers import clean_edits, clean_loops, logged_warnings
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import count, thorough

LOOPS = {**clean_loops.LOOPS, **clean_edits.LOOPS}
# By default a rotation of digests takes 16 calls; in detail every call compares everything.
STEPS = {"info": count(math.ceil(10_000 / len(LOOPS)), 36), "detail": count(math.ceil(10_000 / len(LOOPS)), 15)}
CHECKS = {"info": Checks(), "detail": Checks("detail"), "detail, every 5": Checks("detail", every=5)}


def _run_all(rank: int, checks: Checks) -> dict[str, list[str]]:
    said = {}
    for name, loop in LOOPS.items():
        try:
            loop(rank, checks, STEPS[checks.level])
            said[name] = logged_warnings.take()
        except LegacyDDPError as error:  # on all ranks: the next loop can run
            said[name] = [str(error), *logged_warnings.take()]
    return said


@cache
def _said(world_size: int, checks: str) -> list[dict[str, list[str]]]:
    return run_ranks(_run_all, world_size, CHECKS[checks], timeout_seconds=count(3600, 240))


@pytest.mark.slow
@pytest.mark.parametrize("world_size, checks", [(2, "info"), (3, "detail"), thorough(2, "detail, every 5")])
@pytest.mark.parametrize("name", LOOPS)
def test_nothing_is_said_of_a_healthy_training(name: str, world_size: int, checks: str) -> None:
    assert [of_rank[name] for of_rank in _said(world_size, checks)] == [[]] * world_size
