"""Metrics of two runs are compared call by call, exactly, and decide no verdict."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import MetricDifference, command, compare
from tests.helpers.traces import call_facts, write_trace

Metrics = Sequence[Mapping[str, float]]  # of steps 1 to 5


def _facts(metrics: Metrics, step: int, rank: int) -> Any:
    return call_facts(step, rank, metrics=metrics[step - 1])


def _compare(folder: Path, a: Metrics, b: Metrics, sizes: tuple[int, int] = (2, 2)) -> Any:
    for label, metrics, size in zip("ab", (a, b), sizes, strict=True):
        write_trace(folder / label, world_size=size, calls=partial(_facts, metrics))
    return compare(folder / "a", folder / "b")


def _section(folder: Path) -> list[str]:
    """The lines about metrics."""
    shown = command("diff", folder / "a", folder / "b").stdout.splitlines()
    at = shown.index("metrics that differ, each at its first step:") + 1
    return shown[at : shown.index("", at)] if "" in shown[at:] else shown[at:]


def test_equal_metrics_are_no_difference(tmp_path: Path) -> None:
    metrics = [{"loss": 1.0 / step, "nan": math.nan, "inf": math.inf} for step in range(1, 6)]

    assert _compare(tmp_path, metrics, metrics).metrics == ()


def test_the_first_call_with_another_sum_is_told_with_both_sums(tmp_path: Path) -> None:
    same, loss, both = {"loss": 1.0, "k": 3.0}, {"loss": math.nextafter(1.0, 2.0), "k": 3.0}, {"loss": 2.0, "k": 4.0}

    found = _compare(tmp_path, [same] * 5, [same, same, loss, same, both])

    assert found.metrics == (
        MetricDifference("loss", 3, 1.0, 1.0000000000000002, differing=2, calls=5),
        MetricDifference("k", 5, 3.0, 4.0, differing=1, calls=5),
    )
    assert found.verdict == "same"  # digests decide
    assert _section(tmp_path) == [
        "  'loss', step 3: 1.0 in A, 1.0000000000000002 in B (differs in 2 of 5 calls)",
        "  'k', step 5: 3.0 in A, 4.0 in B (differs in 1 of 5 calls)",
    ]


@pytest.mark.parametrize(
    "a, b, sides",
    [
        ({"m": math.nan}, {"m": 1.0}, ("nan", 1.0)),
        ({"m": -math.inf}, {"m": math.inf}, ("-inf", "inf")),
        ({"m": 0.0}, {"m": -0.0}, (0.0, -0.0)),
        ({}, {"m": 1.0}, (None, 1.0)),
        ({"m": 1.0}, {}, (1.0, None)),
    ],
)
def test_any_other_bits_are_a_difference(
    a: dict[str, float], b: dict[str, float], sides: tuple[object, object], tmp_path: Path
) -> None:
    found = _compare(tmp_path, [a] * 5, [b] * 5)

    (difference,) = found.metrics
    assert str((difference.a, difference.b)) == str(sides)
    shown = ["nothing" if side is None else str(side) for side in sides]
    assert _section(tmp_path) == [f"  'm', step 1: {shown[0]} in A, {shown[1]} in B (differs in 5 of 5 calls)"]


def test_runs_of_other_world_sizes_are_compared_too(tmp_path: Path) -> None:
    found = _compare(tmp_path, [{"loss": 1.0}] * 5, [{"loss": 2.0}] * 5, (1, 3))

    assert found.metrics == (MetricDifference("loss", 1, 1.0, 2.0, differing=5, calls=5),)
