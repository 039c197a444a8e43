"""Metrics, logged values, command line and commit in recorded traces."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from legacy_ddp import all_reduce_gradients
from legacy_ddp.debug import Recorder
from tests.helpers import logged_warnings
from tests.helpers.ranks import run_ranks
from tests.helpers.recorded import Recorded
from tests.helpers.small_models import add_gradients, error_of, wrap
from tests.helpers.small_models import step as take_step


def _record(rank: int, folder: Path) -> None:
    model = wrap()
    with Recorder(model, folder / "sums"):
        take_step(model, 1.0, metrics={"loss": 0.1 + rank, "k": 2})
        take_step(model, 1.0)
        take_step(model, 1.0, metrics={"loss": math.nan, "k": (-1.0) ** rank * math.inf})
        take_step(model, 1.0, metrics={"loss": math.inf})
    with Recorder(model, folder / "logged") as recorder:
        recorder.log(begun="yes")
        take_step(model, 1.0)
        recorder.log(loss=torch.tensor(0.5 + rank), lr=np.float32(0.25))
        recorder.log(lr=0.125)
        take_step(model, 1.0)
        if rank:
            recorder.log(only="here", self=3)
    with Recorder(model, folder / "join"), model.join():
        for _ in range(1 + rank):
            take_step(model, 1.0, metrics={"loss": 1.0})


def test_sums_are_in_the_trace_of_every_rank_and_logged_values_in_that_of_their_own(tmp_path: Path) -> None:
    run_ranks(_record, 2, tmp_path)

    for rank in range(2):
        sums, logged, join = (Recorded(tmp_path / name, rank) for name in ("sums", "logged", "join"))
        assert [str(call.metrics) for call in sums.calls.values()] == [
            str({"k": 4.0, "loss": math.fsum([0.1, 1.1])}),
            "{}",
            "{'k': nan, 'loss': nan}",
            "{'loss': inf}",
        ]
        of_rank_1 = {2: {"only": "here", "self": 3.0}} if rank else {}
        assert logged.logged == {0: {"begun": "yes"}, 1: {"loss": 0.5 + rank, "lr": 0.125}, **of_rank_1}
        # Rank 0 has left after one step.
        assert [call.metrics for call in join.calls.values()] == [{"loss": 2.0}, {"loss": 1.0}]


@pytest.mark.usefixtures("alone")
def test_calls_and_logged_values_are_in_the_file_at_once_also_those_that_are_not_finite(tmp_path: Path) -> None:
    model = wrap()
    with Recorder(model, tmp_path) as recorder:
        recorder.log(a=math.nan, b=math.inf, c=-math.inf, d="\ud800 é")
        assert str(Recorded(tmp_path).logged) == "{0: {'a': nan, 'b': inf, 'c': -inf, 'd': '\\ud800 é'}}"
        take_step(model, 1.0)
        assert Recorded(tmp_path).steps == [0, 1]  # a kill loses no step
        recorder.log(loss=0.5)
        assert Recorded(tmp_path).logged[1] == {"loss": 0.5}


@pytest.mark.usefixtures("alone")
def test_values_of_steps_that_are_not_recorded_are_left_out(tmp_path: Path) -> None:
    model = wrap()
    with Recorder(model, tmp_path, every=2) as recorder:
        for step in range(1, 5):
            take_step(model, 1.0, metrics={"loss": float(step)})
            recorder.log(step=step)

    trace = Recorded(tmp_path)
    assert trace.logged == {2: {"step": 2.0}, 4: {"step": 4.0}}
    assert {step: call.metrics for step, call in trace.calls.items()} == {2: {"loss": 2.0}, 4: {"loss": 4.0}}


@pytest.mark.usefixtures("alone")
def test_a_value_that_cannot_be_logged_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    expected = "expected a real number, a tensor with one element, or a text"
    model = wrap()
    with Recorder(model, tmp_path) as recorder:
        for value, text in (
            *((value, f"got {type(value).__name__}, {expected}") for value in ([1.0], None, 1j, b"text")),
            (torch.zeros(2), "got a tensor of shape (2,), expected one element"),
        ):
            said = error_of(recorder.log, good=1, x=value)
            assert said is not None
            assert (said[0], said[1].startswith(f"log['x'] is not usable: {text}")) == ("TypeError", True), said
        out_of_range = ("ValueError", "log['x'] is out of range: got more than 1.8e308, expected a double")
        assert error_of(recorder.log, good=1, x=10**400) == out_of_range
        unnamed = "log() takes values by name: got {'loss': 1}, expected name=value; write log(**values)"
        assert error_of(recorder.log, {"loss": 1}) == ("TypeError", unnamed)
        take_step(model, 1.0)

    assert Recorded(tmp_path).logged == {}


@pytest.mark.usefixtures("alone")
def test_outside_of_the_block_nothing_can_be_logged_and_a_block_without_any_call_is_warned_of(tmp_path: Path) -> None:
    model = wrap()
    recorder = Recorder(model, tmp_path)
    expected = ("ValueError", "log() was called outside of the recorder's block, expected inside: with Recorder(...):")

    assert error_of(recorder.log, loss=1.0) == expected
    with recorder:
        add_gradients(model, 1.0)
        all_reduce_gradients(model.module)  # not what it looks at
    (told,) = logged_warnings.take()
    assert "holds no step: the recorder saw no all_reduce" in told
    assert error_of(recorder.log, loss=1.0) == expected


@pytest.mark.usefixtures("alone")
def test_the_command_line_is_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--name", "two words", "--lr=0.1"])
    model = wrap()
    for name, argv in (("a", True), ("b", False)):
        with Recorder(model, tmp_path / name, argv=argv):
            take_step(model, 1.0)

    recorded, left_out = (Recorded(tmp_path / name).environment.facts["argv"] for name in "ab")
    assert (recorded, left_out) == ("train.py --name 'two words' --lr=0.1", "not recorded")
    assert "two words" not in (tmp_path / "b/rank-00000.jsonl").read_text()
