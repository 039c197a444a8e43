"""Metrics of a call: sums over the ranks, and agreed errors for names and values that do not fit."""

import copy
import json
import math
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from legacy_ddp import LegacyDistributedDataParallel, LostPeerError, SyncRecord, all_reduce_gradients
from tests.helpers.rank_faults import do_when
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import add_gradients, error_of, gradient_values, wrap


def _model(**options: Any) -> LegacyDistributedDataParallel:
    """A wrapper with gradients."""
    model = wrap(**options)
    add_gradients(model, 1.0)
    return model


def _call(rank: int, of_ranks: Sequence[dict[str, Any]], options: dict[str, Any]) -> tuple[int, dict[str, float]]:
    record = _model(**options).all_reduce(**of_ranks[rank])
    return record.call, dict(record.metrics)


THREE = (
    {"metrics": {"loss": 1.5, "correct": 3}},
    {"metrics": {"correct": 4, "loss": 0.25}},
    {"metrics": {"loss": -1.0, "correct": True}},
)


def _values(*values: float) -> tuple[dict[str, Any], ...]:
    return tuple({"metrics": {"loss": value}} for value in values)


# The arguments of the ranks, the settings of the wrapper, and the sums, in the order of the names.
SUMS: dict[str, tuple[tuple[dict[str, Any], ...], dict[str, Any], dict[str, float]]] = {
    "of three ranks, without checks": (THREE, {"checks": "off"}, {"correct": 8.0, "loss": 0.75}),
    "of three ranks": (THREE, {}, {"correct": 8.0, "loss": 0.75}),
    "of nothing": (({"metrics": None}, {"metrics": {}}), {}, {}),
    "of one rank": (_values(0.1), {}, {"loss": 0.1}),
    "of small terms between large terms": (_values(1e16, 1.0, -1e16), {}, {"loss": 1.0}),
    "with NaN": (_values(math.nan, 1.0), {}, {"loss": math.nan}),
    "with infinity": (_values(math.inf, 1.0), {}, {"loss": math.inf}),
    "with two infinities": (_values(math.inf, -math.inf), {}, {"loss": math.nan}),
    "below the least number": (_values(-1.7e308, -1.7e308), {}, {"loss": -math.inf}),
    "also of a rank that skips": (
        ({"metrics": {"seen": 1}}, {"skip": True, "metrics": {"seen": 2}}),
        {},
        {"seen": 3.0},
    ),
    "where no rank takes part": (({"skip": True, "metrics": {"skipped": 1}},) * 2, {}, {"skipped": 2.0}),
    "with reproducible sums": (
        tuple({"sample_size": 1 + rank, "metrics": {"loss": 1.5}} for rank in range(2)),
        {"reproducible": True},
        {"loss": 3.0},
    ),
}


def test_every_rank_has_the_sums_over_all_ranks() -> None:
    for world_size in (1, 2, 3):
        cases = {name: case[:2] for name, case in SUMS.items() if len(case[0]) == world_size}
        for name, seen in run_cases(_call, world_size, cases).items():
            assert str(seen) == str([(1, dict(SUMS[name][2]))] * world_size), name


class _Half:
    def __float__(self) -> float:
        return 0.5


_NUMBERS: list[tuple[Any, float]] = [
    (2**53 + 1, 2.0**53),
    (np.float32(0.1), float(np.float32(0.1))),
    (np.int64(7), 7.0),
    (np.array(1.25), 1.25),
    (np.array([1.25]), 1.25),
    (torch.tensor(3), 3.0),
    (torch.tensor([0.5], dtype=torch.bfloat16), 0.5),
    (torch.ones(1, 1, requires_grad=True).sum(), 1.0),
    (torch.tensor(True), 1.0),
    (Decimal("0.1"), 0.1),
    (Fraction(1, 3), 1 / 3),
    (_Half(), 0.5),
    (False, 0.0),
]


@pytest.mark.usefixtures("alone")
def test_numbers_of_all_kinds_are_read_as_doubles() -> None:
    numbers = {repr(value): value for value, _ in _NUMBERS}
    assert _model().all_reduce(metrics=numbers).metrics == {repr(value): number for value, number in _NUMBERS}


class _Broken:
    def __float__(self) -> float:
        raise ZeroDivisionError("no items")


_NOT_USABLE: list[tuple[Any, str]] = [
    ("1.0", "str, expected a real number"),
    (None, "NoneType, expected a real number"),
    (1j, "complex, expected a real number"),
    (np.complex64(1), "complex64, expected a real number"),
    (np.zeros(2), "ndarray, expected a real number"),
    (_Broken(), "_Broken, expected a real number"),
    (torch.zeros(2, 3), "a tensor of shape (2, 3), expected one element"),
    (torch.zeros(0), "a tensor of shape (0,), expected one element"),
    (torch.zeros((), device="meta"), "a tensor of the meta device"),
    (torch.tensor(1j), "a tensor of torch.complex64"),
]
_WRONG: list[tuple[Any, str, str]] = [
    *(({"a": 1.0, "m": value}, "TypeError", f"metrics['m'] is not usable: got {got}") for value, got in _NOT_USABLE),
    ({"m": 10**400}, "ValueError", "metrics['m'] is out of range: got more than 1.8e308, expected a double"),
    ({"loss": 1.0, "": 1.0}, "ValueError", "a name in metrics is empty: got '', expected at least one character"),
    ([("loss", 1.0)], "TypeError", "metrics is of the wrong type: got list, expected a mapping of names to numbers"),
    ({3: 1.0}, "TypeError", "a name in metrics is of the wrong type: got 3, expected a str"),
]


@pytest.mark.usefixtures("alone")
def test_metrics_that_are_no_mapping_from_names_to_numbers_are_an_error_with_the_name() -> None:
    for metrics, kind, text in _WRONG:
        said = error_of(_model().all_reduce, metrics=metrics)
        assert (said[0], said[1][: len(text)]) == (kind, text)


def _wrong_then_right(rank: int, wrong: list[Any], right: Any) -> tuple[Any, ...]:
    model = _model()
    before = gradient_values(model)
    error = error_of(model.all_reduce, metrics=wrong[rank])
    unchanged = gradient_values(model) == before
    record = model.all_reduce(metrics=right)
    return error, unchanged, record.call, dict(record.metrics)


_BAD: dict[str, tuple[list[Any], Any]] = {  # by the rank at fault
    "1": ([{"loss": 1.0}, {"loss": "1.0"}], {"loss": 2.0}),
    "0": ([{"loss": torch.zeros(2)}, {"loss": 1.0}], {"loss": 2.0}),
}


def test_a_bad_value_on_one_rank_is_an_error_on_all_ranks() -> None:
    for bad, of_ranks in run_cases(_wrong_then_right, 2, _BAD).items():
        for error, unchanged, call, sums in of_ranks:
            assert error[0] == "PeerError"
            assert f"rank {bad} failed before the exchange" in error[1]
            assert f"rank {bad}: TypeError: metrics['loss'] is not usable" in error[1]
            assert (unchanged, call, sums) == (True, 1, {"loss": 4.0})


_LOSS, _BOTH = {"loss": 1.0}, {"loss": 1.0, "k": 1}
# What the ranks bring, and what is listed.
_OTHER_NAMES: dict[str, tuple[list[Any], str]] = {
    "another name": (
        [_LOSS, _LOSS, {"los": 1.0}],
        "metric 'loss': rank 2 has nothing; ranks 0-1 have a value\n"
        "  metric 'los': rank 2 has a value; ranks 0-1 have nothing",
    ),
    "no metrics": ([_LOSS, None, _LOSS], "metric 'loss': rank 1 has nothing; ranks 0, 2 have a value"),
    "a name less": ([_BOTH, _BOTH, _LOSS], "metric 'k': rank 2 has nothing; ranks 0-1 have a value"),
}


def test_other_names_on_a_rank_are_an_error_with_the_rank_and_the_names() -> None:
    cases = {name: (wrong, {"loss": 2.0}) for name, (wrong, _) in _OTHER_NAMES.items()}
    for name, of_ranks in run_cases(_wrong_then_right, 3, cases).items():
        text = (
            f"all_reduce() call 1: ranks bring different metrics:\n  {_OTHER_NAMES[name][1]}\n"
            "pass metrics= with equal names on every rank, with 0.0 on a rank without data"
        )
        assert of_ranks == [(("DesyncError", text), True, 1, {"loss": 6.0})] * 3


_INSIDE = (
    "metric 'loss' has no sum: got a record of all_reduce() inside no_sync(), which exchanges nothing, expected one of "
    "a call outside of the block; read the metrics after that call, or if record.synchronized"
)


@on_ranks(2)
def _records_inside(rank: int) -> tuple[SyncRecord, tuple[str, str], Any]:
    model = _model()
    with model.no_sync():
        record = model.all_reduce(metrics={"loss": 1.0})
    return record, error_of(lambda: record.metrics["loss"]), error_of(lambda: model.all_reduce().metrics["loss"])


def test_a_metric_of_a_call_inside_no_sync_says_that_nothing_was_exchanged() -> None:
    for record, inside, outside in _records_inside():
        assert inside == ("KeyError", repr(_INSIDE))
        assert outside == ("KeyError", "'loss'")  # as of every dict
        for same in (record, copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record))):
            assert (same.metrics, same.metrics.get("loss"), "loss" in same.metrics) == ({}, None, False)
            assert error_of(lambda metrics=same.metrics: metrics["loss"])[0] == "KeyError"
        assert json.loads(json.dumps(record.as_dict()))["metrics"] == {}


def _until_data_end(rank: int, options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """The metrics of the calls made by this rank, and of the calls seen by an observer on this rank."""
    model = _model(**options)
    model.zero_grad()
    observed: list[Any] = []
    model._synchronizer.observers.reduced.add(lambda record: observed.append(dict(record.metrics)))
    returned = []
    with model.join():
        for step in range(1 + 3 * rank):
            add_gradients(model, 1.0)
            size = {"sample_size": 1} if options.get("reproducible") else {}
            metrics = {"loss": 10.0**step, "k": rank} if step % 2 == 0 else None
            returned.append(dict(model.all_reduce(**size, metrics=metrics).metrics))
            model.zero_grad()
    return returned, observed


def test_a_rank_that_has_left_join_counts_as_zeros() -> None:
    expected = [{"k": 1.0, "loss": 2.0}, {}, {"k": 1.0, "loss": 100.0}, {}]
    cases = {"plain": ({},), "reproducible": ({"reproducible": True},)}

    for (first, seen_by_first), (second, seen_by_second) in run_cases(_until_data_end, 2, cases).values():
        assert first == expected[:1]
        assert second == expected
        assert seen_by_first == seen_by_second == expected


def _dies_with_agreed_headers(rank: int) -> tuple[str, tuple[int, ...], str | None] | None:
    model = _model()
    model.all_reduce(metrics={"loss": 1.0})  # the watchdog knows the other ranks from now on
    model.zero_grad()
    add_gradients(model, 1.0)
    if rank == 1:
        sys.setprofile(do_when("sum_metrics", partial(os.kill, os.getpid(), signal.SIGKILL)))
    with pytest.raises(LostPeerError) as caught:
        model.all_reduce(metrics={"loss": 1.0})
    return type(caught.value).__name__, caught.value.ranks, caught.value.phase


def test_a_rank_that_dies_before_it_sends_its_metrics_is_named() -> None:
    for seen in run_ranks(_dies_with_agreed_headers, 3, lost=(1,))[::2]:
        assert seen == ("PeerLostError", (1,), "metrics")


@on_ranks(2, [{"loss": 3.0}] * 2)
def test_the_function_sums_metrics_too(rank: int) -> dict[str, float]:
    module = torch.nn.Linear(2, 1)
    add_gradients(module, 1.0)
    return dict(all_reduce_gradients(module, metrics={"loss": rank + 1}).metrics)


_ODD_NAMES = ["perte é", "lone \ud800", " ", "a\0b"]


@on_ranks(2, [(dict.fromkeys(_ODD_NAMES, 2.0), "DesyncError", "DesyncError")] * 2)
def test_any_text_but_the_empty_text_is_a_name(rank: int) -> tuple[Any, ...]:
    model = _model()
    sums = model.all_reduce(metrics=dict.fromkeys(_ODD_NAMES, 1.0)).metrics
    less = error_of(model.all_reduce, metrics=dict.fromkeys(_ODD_NAMES[rank:], 1.0))
    split = error_of(model.all_reduce, metrics={"a\0b": 1.0} if rank else {"a": 1.0, "b": 1.0})
    return dict(sums), less and less[0], split and split[0]
