"""Metrics, logged values, command line and commit in recorded traces."""

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from legacy_ddp.debug import Recorder
from tests.helpers import logged_warnings
from tests.helpers.ranks import run_ranks
from tests.helpers.recorded import Recorded
from tests.helpers.small_models import add_gradients, error_of, wrap


def _call(model: Any, **arguments: Any) -> None:
    model.zero_grad()
    add_gradients(model, 1.0)
    model.all_reduce(**arguments)


def _metrics(folder: Path, rank: int = 0) -> dict[int, dict[str, float]]:
    return {step: call.metrics for step, call in Recorded(folder, rank).calls.items()}


def _logged(folder: Path, rank: int = 0) -> dict[int, dict[str, float | str]]:
    return Recorded(folder, rank).logged


def _record_sums(rank: int, folder: Path) -> None:
    model = wrap()
    with Recorder(model, folder):
        _call(model, metrics={"loss": 0.1 + rank, "k": 2})
        _call(model)
        _call(model, metrics={"loss": math.nan, "k": (-1.0) ** rank * math.inf})
        _call(model, metrics={"loss": math.inf})


def test_the_sums_of_each_call_are_in_the_trace_of_every_rank(tmp_path: Path) -> None:
    run_ranks(_record_sums, 2, tmp_path)

    for rank in range(2):
        found = _metrics(tmp_path, rank)
        assert found[1] == {"k": 4.0, "loss": math.fsum([0.1, 1.1])}
        assert found[2] == {}
        assert str(found[3]) == "{'k': nan, 'loss': nan}"
        assert found[4] == {"loss": math.inf}


def _record_until_data_end(rank: int, folder: Path) -> None:
    model = wrap()
    with Recorder(model, folder), model.join():
        for _ in range(1 + rank):
            _call(model, metrics={"loss": 1.0})


def test_a_rank_that_has_left_join_records_the_sums_of_the_others(tmp_path: Path) -> None:
    run_ranks(_record_until_data_end, 2, tmp_path)

    assert [_metrics(tmp_path, rank) for rank in range(2)] == [{1: {"loss": 2.0}, 2: {"loss": 1.0}}] * 2


def _log_on_ranks(rank: int, folder: Path) -> None:
    model = wrap()
    with Recorder(model, folder) as recorder:
        recorder.log(begun="yes")
        _call(model)
        recorder.log(loss=torch.tensor(0.5 + rank), lr=np.float32(0.25))
        recorder.log(lr=0.125)
        _call(model)
        if rank:
            recorder.log(only="here", self=3)


def test_logged_values_belong_to_the_rank_and_the_last_step(tmp_path: Path) -> None:
    run_ranks(_log_on_ranks, 2, tmp_path)

    assert _logged(tmp_path, 0) == {0: {"begun": "yes"}, 1: {"loss": 0.5, "lr": 0.125}}
    assert _logged(tmp_path, 1) == {
        0: {"begun": "yes"},
        1: {"loss": 1.5, "lr": 0.125},
        2: {"only": "here", "self": 3.0},
    }


@pytest.mark.usefixtures("alone")
def test_values_that_are_not_finite_are_logged(tmp_path: Path) -> None:
    model = wrap()
    with Recorder(model, tmp_path) as recorder:
        recorder.log(a=math.nan, b=math.inf, c=-math.inf, d="\ud800 é")
        _call(model)

    assert str(_logged(tmp_path)) == "{0: {'a': nan, 'b': inf, 'c': -inf, 'd': '\\ud800 é'}}"


@pytest.mark.usefixtures("alone")
def test_values_of_steps_that_are_not_recorded_are_left_out(tmp_path: Path) -> None:
    model = wrap()
    with Recorder(model, tmp_path, every=2) as recorder:
        for step in range(1, 5):
            _call(model, metrics={"loss": float(step)})
            recorder.log(step=step)

    assert _logged(tmp_path) == {2: {"step": 2.0}, 4: {"step": 4.0}}
    assert _metrics(tmp_path) == {2: {"loss": 2.0}, 4: {"loss": 4.0}}


@pytest.mark.usefixtures("alone")
def test_logged_values_are_in_the_file_at_once(tmp_path: Path) -> None:
    model = wrap()
    with Recorder(model, tmp_path) as recorder:
        _call(model)
        recorder.log(loss=0.5)
        assert _logged(tmp_path) == {1: {"loss": 0.5}}


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "value, expected",
    [
        ([1.0], ("TypeError", "log['x'] is not usable: got list, expected a real number")),
        (
            None,
            (
                "TypeError",
                "log['x'] is not usable: got NoneType, expected a real number, a tensor with one element, or a text",
            ),
        ),
        (1j, ("TypeError", "log['x'] is not usable: got complex, expected a real number")),
        (b"text", ("TypeError", "log['x'] is not usable: got bytes, expected a real number")),
        (torch.zeros(2), ("TypeError", "log['x'] is not usable: got a tensor of shape (2,), expected one element")),
        (10**400, ("ValueError", "log['x'] is out of range: got more than 1.8e308, expected a double")),
    ],
    ids=["list", "None", "complex", "bytes", "tensor", "large"],
)
def test_a_value_that_cannot_be_logged_is_named_and_nothing_is_written(
    value: object, expected: tuple[str, str], tmp_path: Path
) -> None:
    model = wrap()
    with Recorder(model, tmp_path) as recorder:
        error = error_of(recorder.log, good=1, x=value)
        _call(model)

    assert error is not None
    assert (error[0], error[1].startswith(expected[1])) == (expected[0], True)
    assert _logged(tmp_path) == {}


@pytest.mark.usefixtures("alone")
def test_a_mapping_of_values_is_an_error_with_the_call_to_write(tmp_path: Path) -> None:
    recorder = Recorder(wrap(), tmp_path)
    text = "log() takes values by name: got {'loss': 1}, expected name=value; write log(**values)"

    assert error_of(recorder.log, {"loss": 1}) == ("TypeError", text)


@pytest.mark.usefixtures("alone")
def test_outside_of_the_block_nothing_can_be_logged(tmp_path: Path) -> None:
    recorder = Recorder(wrap(), tmp_path)
    expected = ("ValueError", "log() was called outside of the recorder's block, expected inside: with Recorder(...):")

    assert error_of(recorder.log, loss=1.0) == expected
    with recorder:
        pass
    (told,) = logged_warnings.take()
    assert "holds no step" in told
    assert error_of(recorder.log, loss=1.0) == expected


@pytest.mark.usefixtures("alone")
def test_a_trace_that_ended_early_takes_no_values_and_raises_nothing(tmp_path: Path) -> None:
    model = wrap()
    with Recorder(model, tmp_path) as recorder:
        _call(model)
        recorder._try(_fail)
        (told,) = logged_warnings.take()
        assert "ends before step 2" in told
        recorder.log(loss=1.0)

    assert _logged(tmp_path) == {}


def _fail(_: object) -> None:
    raise OSError(28, "No space left on device")


def _facts(folder: Path, **options: Any) -> dict[str, str]:
    model = wrap()
    with Recorder(model, folder, **options):
        _call(model)
    return Recorded(folder).environment.facts


@pytest.mark.usefixtures("alone")
def test_the_command_line_is_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--name", "two words", "--lr=0.1"])

    assert _facts(tmp_path / "a")["argv"] == "train.py --name 'two words' --lr=0.1"
    facts = _facts(tmp_path / "b", argv=False)
    assert facts["argv"] == "not recorded"
    assert "two words" not in (tmp_path / "b/rank-00000.jsonl").read_text()
