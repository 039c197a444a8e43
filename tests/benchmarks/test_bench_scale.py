"""The calls that bench_scale.py measures, and its model. Nothing here looks at a time."""

from itertools import product
from typing import Any

import _alpha_beta
import _calls
import _fit
import _rank_growth
import pytest

from tests.helpers.ranks import run_ranks

CALLS = ["bare all_reduce", "ours, off, views", "ours, off, to pack", "ours, info, views", "ours, info, to pack"]


def _gradients(rank: int) -> list[Any]:
    """What every variant finds before it runs, and has reduced after it: values, and how many are to be packed."""
    calls = _calls.Calls(48, 3)
    calls.build()
    found = []
    for variant in calls.build():
        variant.prepare()
        tensors = _tensors(calls, variant.name)
        loose = sum(tensor.untyped_storage().resizable() for tensor in tensors)  # those that are no slots
        for tensor in tensors:
            tensor.mul_(rank + 1)
        variant.run()
        found.append([variant.name, loose, [tensor.tolist() for tensor in _tensors(calls, variant.name)]])
    return found


def _tensors(calls: Any, name: str) -> list[Any]:
    if name == CALLS[0]:
        return [calls._flat]
    return [p.grad for p in calls._models["ours, off" if "off" in name else "ours, info"].parameters]


def test_every_call_reduces_the_same_bytes() -> None:
    for found in run_ranks(_gradients, 2):
        assert found == [
            [CALLS[0], 1, [[3.0] * 12]],  # the sum of 1 and 2; ours is the mean
            [CALLS[1], 0, [[1.5] * 4] * 3],
            [CALLS[2], 3, [[1.5] * 4] * 3],
            [CALLS[3], 0, [[1.5] * 4] * 3],
            [CALLS[4], 3, [[1.5] * 4] * 3],
        ]


def test_a_ring_hands_every_chunk_round_twice() -> None:
    assert _alpha_beta.ring_terms(1, 100) == (1, 0, 0)
    assert _alpha_beta.ring_terms(2, 100) == (1, 2, 100)  # a half there, a half back
    assert _alpha_beta.ring_terms(5, 100) == (1, 8, 160)

    ring = _alpha_beta.Ring("by hand", call_seconds=3.0, alpha_seconds=0.5, beta_seconds=0.25)

    assert ring.seconds(5, 100) == 3 + 8 * 0.5 + 160 * 0.25


def test_ours_adds_headers_rows_tensors_and_a_pass_over_the_bytes() -> None:
    ring = _alpha_beta.Ring("by hand", call_seconds=3.0, alpha_seconds=0.5, beta_seconds=0.25)
    headers = _alpha_beta.Headers(message_seconds=0.5, row_seconds=11.0, per_host=8)
    ours = _alpha_beta.Ours(call_seconds=7.0, byte_seconds=0.125, tensor_seconds=2.0)

    # Of 5 ranks on a host, 2 hops, 8 messages and 4 + 4 x 5 rows of 184 bytes.
    exchange = 2 * 0.5 + 8 * 0.5 + 24 * 184 * 0.25
    assert headers.seconds(ring, 5) == exchange + 55
    assert ours.seconds(ring, headers, 5, 100, tensors=13) == 47 + exchange + 55 + 7 + 12.5 + 26


RUNS = list(product((2, 4, 16), (2**16, 2**20, 2**24)))


@pytest.mark.parametrize("costs", [(3e-4, 5e-5, 1e-9), (0.0, 5e-5, 1e-9), (3e-4, 0.0, 2e-10)])
def test_a_fit_recovers_the_costs_that_made_the_times(costs: tuple[float, float, float]) -> None:
    ring = _alpha_beta.Ring("true", *costs)
    times = {key: ring.seconds(*key) for key in RUNS}

    fitted = _alpha_beta.fit_ring("fitted", times)

    found = (fitted.call_seconds, fitted.alpha_seconds, fitted.beta_seconds)
    assert found == pytest.approx(costs, rel=1e-6, abs=1e-12)
    assert all(abs(missed) < 1e-6 for missed in _alpha_beta.residuals(fitted, times).values())


def test_short_times_count_as_much_as_long_ones() -> None:
    # (c - 1)^2 + (1000 c / 1500 - 1)^2 is least where c (1 + 4/9) = 1 + 2/3.
    assert _fit.fit_costs([[1.0], [1000.0]], [1.0, 1500.0]) == pytest.approx([15 / 13])


def test_what_ours_adds_is_recovered_from_runs_of_two_ranks() -> None:
    ring = _alpha_beta.Ring("true", 0.0, 2e-4, 1e-9)
    headers = _alpha_beta.Headers(message_seconds=2e-6, row_seconds=7e-6, per_host=8)
    ours = _alpha_beta.Ours(call_seconds=4e-4, byte_seconds=3e-10, tensor_seconds=5e-6)
    keys = [key for key in RUNS if key[0] == 2]
    bare = {key: 1.1 * ring.seconds(*key) for key in keys}  # whatever the ring missed is no cost of ours
    whole = {key: bare[key] + ours.seconds(ring, headers, *key, tensors=4) - ring.seconds(*key) for key in keys}

    found = _alpha_beta.fit_ours(ring, headers, bare, whole, tensors=4, tensor_seconds=5e-6)

    assert vars(found) == pytest.approx(vars(ours), rel=1e-6)


def test_a_tensor_costs_what_more_of_them_add() -> None:
    few = {"bare all_reduce": {"median_ms": 5.0}, "ours, off, gloo, to pack": {"median_ms": 6.0}}
    many = {"bare all_reduce": {"median_ms": 7.0}, "ours, off, gloo, to pack": {"median_ms": 17.96}}

    assert _rank_growth.seconds_per_tensor(few, many) == pytest.approx(1e-5)  # 10.96 - 1 ms for 996
    assert _rank_growth.seconds_per_tensor(many, few) == 0.0
