"""Equal work in the benchmarks of a step and of the call, and their arithmetic. Nothing here looks at a time."""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import _measure
import _parity
import _ways
import _workloads
import bench_step
import pytest
import torch
from torch import nn

from tests.helpers.ranks import run_ranks

SMALL_MODELS = {
    "dense": (partial(nn.Linear, 3, 2), lambda count: list(torch.randn(count, 4, 3))),
    "sparse": (partial(nn.Embedding, 50, 4, sparse=True), lambda count: list(torch.randint(50, (count, 9)))),
}


def _small(kind: str) -> Any:
    return _workloads.Workload(*SMALL_MODELS[kind], _workloads.mean_square)


def _check_small(rank: int, kind: str, names: Sequence[str]) -> list[str]:
    gc.disable()  # by chance nothing is tidied up
    for update_freq, set_to_none in ((1, True), (3, False)):
        ways = {name: _ways.WAYS[name] for name in names}
        _parity.check_training(ways, _small(kind), update_freq, set_to_none=set_to_none)
    kinds = (type(held) for held in gc.get_objects())  # a lazy object's isinstance() would load what it stands for
    return [kind.__name__ for kind in kinds if issubclass(kind, nn.Module | torch.optim.Optimizer)]


@pytest.mark.parametrize("kind,model", [("dense", "transformer"), ("sparse", "sparse embedding")])
def test_every_way_trains_like_torch_ddp_and_the_check_leaves_no_model(kind: str, model: str) -> None:
    assert run_ranks(_check_small, 3, kind, list(_ways.ways_for(model))) == [[]] * 3


def _forget_one(model: nn.Module) -> Callable[[], object]:
    return lambda: _ways.average_each(model) if torch.distributed.get_rank() else _average_all_but_bias(model)


def _average_all_but_bias(model: nn.Module) -> None:
    bias = model.bias.grad.clone()
    _ways.average_each(model)
    model.bias.grad.copy_(bias)


def _sum_each(model: nn.Module) -> None:
    _ways.average_each(model)
    for parameter in model.parameters():
        parameter.grad.mul_(torch.distributed.get_world_size())


WRONG_WAYS = {
    "does nothing": _ways.Way(),
    "sums": _ways.Way(after=lambda model: partial(_sum_each, model)),
    "forgets the bias on rank 0": _ways.Way(after=_forget_one),
    "reduces something else": _ways.Way(after=_ways.WAYS["local compute + bare all_reduce"].after),
}


def _exit_text(check: Callable[[], object]) -> str:
    try:
        check()
    except SystemExit as error:
        return str(error)
    return "passed"


def _check_wrong(rank: int) -> list[str]:
    """Of ways to train, and of calls that have to leave the mean over the ranks."""
    check = partial(_parity.check_training, workload=_small("dense"), update_freq=1, set_to_none=True)
    model = nn.Linear(3, 2)

    def fill() -> None:
        model.zero_grad()
        model(torch.full((1, 3), float(rank + 1))).square().sum().backward()

    calls = {"mean": partial(_ways.average_each, model), "nothing": lambda: None}
    return [
        *(_exit_text(partial(check, {name: way})) for name, way in WRONG_WAYS.items()),
        *(_exit_text(partial(_parity.check_mean, name, model, fill, call)) for name, call in calls.items()),
    ]


def test_what_leaves_work_out_is_not_timed_on_any_rank() -> None:
    counts = {"does nothing": 2, "sums": 2, "forgets the bias on rank 0": 1, "reduces something else": 2}
    refused = {
        name: f"{name}: got other values than expected in {count} of 2 tensors; not timed"
        for name, count in {**counts, "nothing": 2}.items()
    }

    assert run_ranks(_check_wrong, 2) == [[*(refused[name] for name in counts), "passed", refused["nothing"]]] * 2


def test_aims_are_those_of_a_model_of_its_micro_batches_and_of_two_ranks() -> None:
    few, many = (bench_step.aims_for("transformer", update_freq, 2) for update_freq in (3, 16))

    assert (few["ours, info / ours, off"], many["ours, info / ours, off"]) == (1.05, 1.03)
    assert bench_step.aims_for("resnet", 1, 2) == {"ours, off / torch DDP": 0.90}
    assert bench_step.aims_for("small", 1, 2) == bench_step.aims_for("transformer", 1, 4) == {}


def test_a_summary_has_medians_of_times_of_phases_and_of_the_ratios_of_the_rounds() -> None:
    phases = [{"plan": 0.001, "pack": 0.5}, {"plan": 0.003}, {"plan": 0.002}]
    other = _measure.Variant("other", lambda: None, seconds=[2.0, 2.0, 10.0], cpu_seconds=[1.0, 2.0, 8.0])
    own = _measure.Variant("own", lambda: None, seconds=[1.0, 6.0, 20.0], cpu_seconds=[3.0, 8.0, 16.0], phases=phases)
    summary = _measure.summarize([other, own])

    # 0.5, 3 and 2; the quotient of the medians would be 3, and the ratio of the last round 2.
    assert summary["own"]["median_ratio"] == _measure.median_ratio([other, own], "own", "other") == 2.0
    assert _measure.median_ratio([other, own], "other", "own") == 0.5
    assert (summary["own"]["cpu_ms"], summary["own"]["cpu_ratio"]) == (8000.0, 3.0)
    assert summary["own"]["phase_ms"] == {"plan": 2.0, "pack": 0.0}  # a phase that did not happen took no time
    assert "phase_ms" not in summary["other"]


def test_an_aim_is_met_up_to_itself_and_by_no_nan() -> None:
    ratios = {"at": 1.05, "above": 1.051, "nan": float("nan"), "without": 9.0}

    told = _measure.verdicts(ratios, {"at": 1.05, "above": 1.05, "nan": 1.05})

    assert told == {"at": "met", "above": "missed", "nan": "missed"}
