"""Gradient noise, straggler, and ranks with the same data."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel, NoiseScale, SyncRecord
from legacy_ddp._statistics import (
    SUSPICIOUS_CALLS,
    LateRank,
    LateRankTrend,
    LimitDetector,
    SameDataDetector,
    StepTimes,
    estimate_noise,
    find_late_rank,
    find_straggler,
)
from tests.helpers import logged_warnings
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import add_gradients, error_of, wrap

# Gradient noise


def test_noise_with_sample_sizes_is_counted_in_items() -> None:
    # |g_r| = 2, 3: A = 6.5, |g|² = 4, h = (1 + 1/3) / 2 = 2/3, N = 4: tr(Σ) = 2.5 / (5/12) = 6, |G|² = 4 - 6/4
    found = estimate_noise([2, 9], [1, 3], 2)

    assert (found.noise, found.squared_norm, found.scale) == pytest.approx((6, 2.5, 2.4))


@given(
    st.integers(2, 6), st.integers(1, 1000), st.lists(st.floats(0.1, 1e3), min_size=6, max_size=6), st.floats(0.1, 1e3)
)
def test_noise_of_equal_sizes_is_that_of_the_paper(ranks: int, size: int, means: list[float], reduced: float) -> None:
    small, big = size, size * ranks
    small_squared = fmean(norm**2 for norm in means[:ranks])
    squared_norm = (big * reduced**2 - small * small_squared) / (big - small)
    noise = (small_squared - reduced**2) / (1 / small - 1 / big)

    found = estimate_noise([norm * size for norm in means[:ranks]], [size] * ranks, reduced)

    largest = max(small_squared, reduced**2)  # differences of squares lose what is small beside them
    assert found.noise == pytest.approx(noise, rel=1e-9, abs=1e-9 * size * largest)
    assert found.squared_norm == pytest.approx(squared_norm, rel=1e-9, abs=1e-9 * largest)


def test_the_scale_is_not_a_number_where_nothing_was_learnt() -> None:
    assert math.isnan(NoiseScale(squared_norm=0.0, noise=1.0).scale)
    assert math.isnan(estimate_noise([math.nan, 1.0], [1, 1], 1.0).scale)
    assert estimate_noise([1e200, 1e200], [1, 1], 1e200).noise != 0  # no OverflowError


def _noise(rank: int) -> list[NoiseScale]:
    model = LegacyDistributedDataParallel(nn.Linear(3, 1, bias=False), checks=Checks(same_data="allow"))
    found = []
    for arguments in ({}, {"sample_size": 2 * rank + 1}, {"skip": rank == 1}):
        model.zero_grad()
        model(torch.tensor([[1.0 + rank, 2.0, -rank]])).sum().backward()
        record = model.all_reduce(**arguments)
        found.append(record.noise_scale(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
    return found


def test_noise_of_real_calls_takes_the_ranks_that_took_part() -> None:
    sums = [torch.tensor([1.0 + rank, 2.0, -rank], dtype=torch.float64) for rank in range(3)]
    norms = [float(one.norm()) for one in sums]
    total = sums[0] + sums[1] + sums[2]
    expected = [
        estimate_noise(norms, [1, 1, 1], float((total / 3).norm())),
        estimate_noise(norms, [1, 3, 5], float((total / 9).norm())),
        estimate_noise([norms[0], norms[2]], [1, 1], float(((sums[0] + sums[2]) / 2).norm())),
    ]

    for found in run_ranks(_noise, 3):
        for ours, theirs in zip(found, expected, strict=True):
            # fp32 norms, and a difference of squares of about their own size
            assert (ours.noise, ours.squared_norm) == pytest.approx((theirs.noise, theirs.squared_norm), rel=1e-4)


_REFUSED = [
    "noise_scale() compares ranks: got 1 that took part, expected at least 2",
    "noise_scale() compares ranks: got 0 that took part, expected at least 2",
    "norms are missing: got those of 0 of 2 ranks, expected all; they are taken with "
    'checks="info" on CPU, and on CUDA with Checks(nonfinite="raise") or LEGACY_DDP_CHECKS=nonfinite=raise',
]


@on_ranks(2, [[("ValueError", text) for text in _REFUSED]] * 2)
def test_noise_is_refused_where_it_cannot_be_known(rank: int) -> list[Any]:
    model, blind = wrap(), wrap(checks="off")
    said = []
    for wrapped, arguments in [(model, {"skip": rank == 1}), (model, {"skip": True}), (blind, {})]:
        wrapped.zero_grad()
        add_gradients(wrapped, rank + 1)
        said.append(error_of(wrapped.all_reduce(**arguments).noise_scale, 1.0))
    return said


def test_a_call_that_met_nobody_has_no_figures() -> None:
    record = SyncRecord(call=0, synchronized=False)

    assert (record.identical_ranks, record.straggler) == ((), None)
    assert error_of(record.noise_scale, 1.0) is not None


# Straggler


@pytest.mark.parametrize(
    "waited, expected",
    [
        ([0.5], None),
        ([], None),
        ([0.0, 0.0, 0.0], None),
        ([0.0, 0.75], (0, 0.75)),
        ([0.5, 0.25, 1.0, 4.0], (1, 0.75)),
        ([2.0, 2.0, 2.0], (0, 0.0)),
    ],
)
def test_the_straggler_is_who_waited_least_against_the_median_of_the_others(
    waited: list[float], expected: tuple[int, float] | None
) -> None:
    assert find_straggler(waited) == expected


# The late rank

_EVEN = (0.05, 0.05, 0.05)


def _times(waited: Sequence[float], **parts: Sequence[float]) -> StepTimes:
    """A step of 100 ms, of which 50 ms are data, 10 ms forward and 20 ms backward where ``parts`` has nothing else."""
    usual = {"data": _EVEN, "forward": (0.01,) * 3, "backward": (0.02,) * 3}
    return StepTimes({**usual, **parts}, 0.1, waited)


# The others of rank 1 wait (30 + 34) / 2 = 32 ms, so 22 ms more than rank 1.
_RANK_1_IS_LATE = (0.030, 0.010, 0.034)


_UNKNOWN = "in which part of its step is not known"


@pytest.mark.parametrize(
    "parts, said",
    [
        (  # 70 - (50 + 51) / 2
            {"data": (0.050, 0.070, 0.051)},
            "rank 1 takes 19.5 ms longer than the others outside of forward and backward "
            "(data loading, optimizer step, logging)",
        ),
        ({"forward": (0.010, 0.032, 0.010)}, "rank 1 takes 22 ms longer than the others in forward"),
        ({"backward": (0.020, 1.521, 0.022)}, "rank 1 takes 1.5 s longer than the others in loss and backward"),
        ({}, _UNKNOWN),  # the parts are even: the time is lost inside of the call, or in a broadcast between two calls
        ({"data": (0.05, 0.06, 0.05)}, _UNKNOWN),  # 10 ms are less than half of 22 ms
        ({"data": (0.05, 0.08, 0.05), "forward": (0.0,) * 3}, _UNKNOWN),  # of a compiled wrapper no forward is seen
    ],
)
def test_the_late_rank_is_named_with_the_part_that_explains_the_wait(
    parts: dict[str, tuple[float, ...]], said: str
) -> None:
    found = find_late_rank([_times(_RANK_1_IS_LATE, **parts)] * 20)

    assert (found.rank, found.seconds, found.share) == (1, pytest.approx(0.022), pytest.approx(0.22))
    assert str(found) == (
        f"the other ranks waited for rank 1 in 20 of 20 calls, 22 ms a call (median), 22% of the step; {said}"
    )


_SHORT = (0.0149, 0.010, 0.0149)  # 4.9 ms of 100 ms
_ENOUGH = (0.0151, 0.010, 0.0151)
_TURNS = [(0.01, 0.04, 0.04), (0.04, 0.01, 0.04), (0.04, 0.04, 0.01)]  # every rank is late in every third call


@pytest.mark.parametrize(
    "waits, rank",
    [
        ([_RANK_1_IS_LATE] * 10, 1),
        ([_RANK_1_IS_LATE] * 9, None),  # too few calls
        ([_ENOUGH] * 20, 1),
        ([_SHORT] * 20, None),
        (_TURNS * 10, None),
        ([_RANK_1_IS_LATE] * 11 + [_TURNS[0]] * 5 + [_TURNS[2]] * 4, 1),  # in 11 of 20 calls
        ([_RANK_1_IS_LATE] * 9 + [_TURNS[0]] * 6 + [_TURNS[2]] * 5, None),  # in 9 of 20
        ([(0.0, 0.0, 0.0)] * 20, None),
    ],
)
def test_a_rank_is_late_that_costs_a_good_part_of_the_step_in_half_of_the_calls(
    waits: list[tuple[float, ...]], rank: int | None
) -> None:
    found = find_late_rank([_times(waited) for waited in waits])

    assert (found and found.rank) == rank


def test_of_three_slow_ranks_that_are_last_in_turns_none_is_named_nor_a_single_rank() -> None:
    # Each of them costs the median of the other ranks 28 or 29 ms in every call, and is the last in every third.
    fast, even = [0.03, 0.03, 0.03], (0.01,) * 6
    waits = [[0.001, 0.002, 0.002, *fast], [0.002, 0.001, 0.002, *fast], [0.002, 0.002, 0.001, *fast]]
    parts = {"data": even, "forward": even, "backward": even}

    assert find_late_rank([StepTimes(parts, 0.06, waited) for waited in waits * 10]) is None
    alone = StepTimes({"data": (1.0,), "forward": (1.0,), "backward": (1.0,)}, 3.0, (0.0,))
    assert find_late_rank([alone] * 20) is None


def test_of_two_ranks_the_one_that_waits_less_is_late() -> None:
    step = StepTimes({"data": (0.25, 0.5), "forward": (0.125, 0.125), "backward": (0.0, 0.0)}, 1.0, (0.25, 0.0))

    assert find_late_rank([step] * 20) == LateRank(1, 20, 20, 0.25, 0.25, "data", 0.25)


def test_a_trend_tells_of_each_hundred_calls_by_the_waits_told_in_the_next_call() -> None:
    trend = LateRankTrend()
    told = {}
    for call in range(1, 302):  # rank 1 is late in calls 1 to 100, rank 2 in calls 101 to 200, and then nobody
        late = 1 if call <= 100 else 2 if call <= 200 else None
        step = _times((), data=[0.08 if rank == late else 0.05 for rank in range(3)])
        waited_before = _TURNS[1] if 1 < call <= 101 else _TURNS[2] if 101 < call <= 201 else (0.0, 0.0, 0.0)
        if found := trend.add(step, waited_before):
            told[call] = found

    assert {call: (found.rank, found.calls, found.of_calls, found.part) for call, found in told.items()} == {
        101: (1, 100, 100, "data"),
        201: (2, 100, 100, "data"),
    }


# Ranks that hold the same


@on_ranks(4, [[((0, 2),), ((2, 3),), (), ((0, 1, 3),), ((0, 1),)]] * 4)
def test_ranks_of_equal_norm_are_told_and_zero_nan_and_ranks_that_skip_equal_nothing(
    rank: int,
) -> list[tuple[tuple[int, ...], ...]]:
    model = wrap(checks=Checks(nonfinite="ignore"))
    found = []
    for value in ([1, 2, 1, 2], [0, 0, 1, 1], [math.nan, math.nan, 1, 2], [1, 1, 1 + 2**-22, 1], [1, -1, 2, 3]):
        model.zero_grad()
        add_gradients(model, value[rank])
        found.append(model.all_reduce(skip=value[rank] == 2).identical_ranks)
    return found


@given(st.lists(st.lists(st.sampled_from([None, 1.0, 2.0]), min_size=5, max_size=5), max_size=40), st.data())
def test_same_data_means_the_ranks_that_were_equal_in_each_of_the_last_calls(
    calls: list[list[float | None]], data: st.DataObject
) -> None:
    # Long runs of the same, or nothing would ever last.
    calls = [call for call in calls for _ in range(data.draw(st.integers(1, SUSPICIOUS_CALLS)))]
    detector = SameDataDetector()
    for index, call in enumerate(calls):
        last = calls[max(0, index + 1 - SUSPICIOUS_CALLS) : index + 1]
        pairs = {
            (i, j)
            for i in range(5)
            for j in range(i)
            if len(last) == SUSPICIOUS_CALLS
            and all(one[i] is not None and one[i] == one[j] for one in last)
            and len({one[i] for one in last}) > 1  # what never changes does not come from data
        }

        groups = detector.add(call)

        assert {(i, j) for group in groups for i in group for j in group if j < i} == pairs


CALLS = 25


def _train(
    rank: int, schedule: Sequence[Sequence[int]], dropout: float = 0.0, checks: Any = "info"
) -> list[tuple[int, str, str]]:
    """Train on batches whose seed is ``schedule[call][rank]``; what was warned of, at which call and line."""
    torch.manual_seed(rank)  # of dropout; weights are those of rank 0
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))
    model = LegacyDistributedDataParallel(net, checks=checks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    said = []
    for call, seeds in enumerate(schedule, 1):
        generator = torch.Generator().manual_seed(1000 * call + seeds[rank])
        optimizer.zero_grad()
        nn.functional.mse_loss(
            model(torch.randn(8, 4, generator=generator)), torch.randn(8, 1, generator=generator)
        ).backward()
        model.all_reduce()
        said += [(call, warning.filename, warning.text) for warning in logged_warnings.take_all()]
        optimizer.step()
    return said


def _text(call: int, ranks: str) -> str:
    return (
        f"all_reduce() call {call}: norms of local gradients are equal on {ranks}, to the last bit, for 10 calls "
        "(warned once):\neither these ranks read the same data (same sampler seed, no DistributedSampler, ...),\n"
        "or their gradients do not depend on the data (dead ReLUs, a loss term of the weights alone, ...);\n"
        "only norms were compared: look at a batch of each of these ranks; see Checks(same_data=...)"
    )


# By the ranks that are told: their schedule, and the call.
_SAME_DATA: dict[str, tuple[list[tuple[int, ...]], int]] = {
    "ranks 0, 2": ([(0, 1, 0, 2)] * CALLS, 10),
    "ranks 0, 2 and on ranks 1, 3": ([(0, 1, 0, 1)] * CALLS, 10),
    # the second pair is identical from call 5 on, the first one too short
    "ranks 2-3": ([(0, 0, 1, 2)] * 4 + [(0, 0, 1, 1)] * 4 + [(0, 3, 1, 1)] * 17, 14),
}


def test_ranks_on_the_same_data_are_warned_of_once_after_ten_calls_and_by_rank_0() -> None:
    found = run_cases(_train, 4, {ranks: case[:1] for ranks, case in _SAME_DATA.items()})
    for ranks, (_, call) in _SAME_DATA.items():
        assert found[ranks] == [[(call, __file__, _text(call, ranks))], [], [], []]


@on_ranks(2, [[], []])
def test_gradients_that_another_wrapper_has_reduced_are_no_sign_of_the_same_data(rank: int) -> list[str]:
    """Two wrappers of one module, both called in every step on data of each rank; the texts of the warnings."""
    net = nn.Linear(4, 1)
    models = [LegacyDistributedDataParallel(net), LegacyDistributedDataParallel(net)]
    for call in range(CALLS):
        net.zero_grad()
        net(torch.full((1, 4), float(call + rank + 1))).sum().backward()
        norms = [[row.local_norm for row in model.all_reduce().rows] for model in models]
        assert norms[0][0] != norms[0][1]
        assert norms[1][0] == norms[1][1]
    return logged_warnings.take()


_SAME = [(0, 0, 0)] * CALLS
_NOT_THE_SAME: dict[str, tuple[Any, ...]] = {
    "different": ([(0, 1, 2)] * CALLS,),
    "dropout that differs by rank": (_SAME, 0.5),
    "nine calls": (([(0, 0, 2)] * 9 + [(0, 1, 2)]) * 3,),
    "allowed": (_SAME, 0.0, Checks(same_data="allow")),
    "off": (_SAME, 0.0, Checks(level="off")),
}


def test_nothing_is_said_of_ranks_that_do_not_hold_the_same_or_may() -> None:
    assert run_cases(_train, 3, _NOT_THE_SAME) == dict.fromkeys(_NOT_THE_SAME, [[]] * 3)


@on_ranks(3, [[(10, "ranks bring uneven work"), (10, "norms of local gradients are equal on ranks 0-1")], [], []])
def test_two_warnings_that_meet_both_come_out(rank: int) -> list[tuple[int, str]]:
    model = wrap()
    said: list[tuple[int, str]] = []
    for call in range(1, 13):
        model.zero_grad()
        for _ in range(1 + (call == 10 and rank == 2)):
            add_gradients(model, call if rank < 2 else -1.5)
        model.all_reduce()
        said += [(call, text.split(": ")[1].split(" (")[0].split(", to")[0]) for text in logged_warnings.take()]
    return said


def _other_group(rank: int) -> list[str]:
    model = wrap()
    groups = [torch.distributed.group.WORLD, torch.distributed.new_group([0, 1, 2])]
    for call in range(18):
        model.process_group = groups[call // 9]
        model.zero_grad()
        add_gradients(model, 1 + (rank == 2))
        model.all_reduce()
    return logged_warnings.take()


def test_calls_on_another_group_begin_anew() -> None:
    assert run_ranks(_other_group, 3) == [[]] * 3


# Norms at a limit


def _found(norms: Sequence[float]) -> list[bool]:
    detector = LimitDetector()
    return [detector.add(norm) for norm in norms]


@given(st.floats(1e-6, 1e6), st.permutations([-3, -1, 0, 2, 4, 5]))
def test_norms_at_a_limit_are_found(limit: float, roundings: list[int]) -> None:
    norms = [limit * (1 + rounding * 2**-24) for rounding in roundings]

    assert _found(norms) == [False] * 4 + [True] * 2


@given(st.lists(st.integers(0, 10**5), max_size=80, unique=True))
def test_norms_that_differ_are_not_found(powers: list[int]) -> None:
    assert not any(_found([1.0001**power for power in powers]))


def test_a_limit_is_found_among_other_norms_for_as_long_as_it_is_recent() -> None:
    others = [3.0 + 0.1 * call for call in range(4)]
    limited = [0.5, 0.5000001, 0.5, 0.4999999, 0.5]

    assert not _found([norm for pair in zip(others, limited, strict=False) for norm in pair])[-1]
    assert _found([*others, *limited])[-1]
    assert not _found([*limited[:4], *others * 8, limited[4]])[-1]
