"""No warning and no error in healthy trainings, by default and with ``checks="detail"``; 10,000 steps in a soak."""

import math
from collections.abc import Collection
from functools import cache

import pytest

from legacy_ddp import Checks, LegacyDDPError
from tests.helpers import clean_edits, clean_loops, logged_warnings
from tests.helpers.ranks import run_ranks
from tests.helpers.tiers import count, thorough

LOOPS = {**clean_loops.LOOPS, **clean_edits.LOOPS}
# By default a rotation of digests takes 16 calls; in detail every call compares everything.
STEPS = {"info": count(math.ceil(10_000 / len(LOOPS)), 24), "detail": count(math.ceil(10_000 / len(LOOPS)), 15)}
# With make test: by default all loops but those that are close to another one, and in detail a loop of each kind of
# state that a rank may hold alone.
REPEATED = {
    "sharpness aware",
    "edit: in bf16",
    "edit: absolute loss",
    "edit: assigned",
    "edit: by hooks after",
    "two optimizers and one scaler",
}
IN_DETAIL = {
    "dropout and statistics",
    "sparse",
    "local sgd",
    "rank 0 looks",
    "several optimizers",
    "joins",
    "ignores",
    "skips agreed nan",
}
CHOSEN = {"info": LOOPS.keys() - REPEATED, "detail": IN_DETAIL, "detail, every 5": set()}
CHECKS = {"info": Checks(), "detail": Checks("detail"), "detail, every 5": Checks("detail", every=5)}


def _run_all(rank: int, checks: Checks, names: Collection[str]) -> dict[str, list[str]]:
    said = {}
    for name in names:
        try:
            LOOPS[name](rank, checks, STEPS[checks.level])
            said[name] = logged_warnings.take()
        except LegacyDDPError as error:  # on all ranks: the next loop can run
            said[name] = [str(error), *logged_warnings.take()]
    return said


@cache
def _said(world_size: int, checks: str, *, is_chosen: bool) -> list[dict[str, list[str]]]:
    names = [name for name in LOOPS if (name in CHOSEN[checks]) == is_chosen]
    return run_ranks(_run_all, world_size, CHECKS[checks], names, timeout_seconds=count(3600, 240))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, world_size, checks",
    [
        (name, world_size, checks) if name in CHOSEN[checks] else thorough(name, world_size, checks)
        for world_size, checks in ((2, "info"), (3, "detail"), (2, "detail, every 5"))
        for name in LOOPS
    ],
)
def test_nothing_is_said_of_a_healthy_training(name: str, world_size: int, checks: str) -> None:
    found = _said(world_size, checks, is_chosen=name in CHOSEN[checks])

    assert [of_rank[name] for of_rank in found] == [[]] * world_size
