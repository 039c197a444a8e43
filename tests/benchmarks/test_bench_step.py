"""Do the benchmarks of a step and of the call compare equal work, and count right? Nothing here looks at a time."""

import argparse
import contextlib
import gc
import io
import json
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _measure
import _parity
import _ways
import _workloads
import bench_all_reduce
import bench_step
import pytest
import torch
from torch import nn

from legacy_ddp import SyncRecord
from tests.helpers.ranks import run_ranks

SHORT = ("--layers", "1", "--repeats", "1", "--rounds", "2", "--warm-up", "0")
ALL_WAYS = [
    "torch DDP",
    "torch DDP, bucket views",
    "torch DDP, static graph",
    "ours, off",
    "ours, info",
    "one collective per parameter",
    "local compute + bare all_reduce",
    "local compute alone",
    "torch DDP again",
]
PHASES = {"plan", "pack", "agree", "payload", "alias"}
PHASES_OF_INFO = PHASES | {"digest"}  # of a part of the replica


def _print_step(rank: int, *given: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        bench_step.run(bench_step.parse_arguments(given))
    return printed.getvalue()


def test_step_writes_a_table_per_update_freq_with_aims_and_verdicts(tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    given = ("--models", "transformer", "--update-freq", "1", "2", "--set-to-none", "yes", *SHORT)

    printed = run_ranks(_print_step, 2, *given, "--json", str(path))
    results = json.loads(path.read_text())["results"]

    titles = [f"step of transformer, update-freq {n}, set_to_none=yes, 2 ranks" for n in (1, 2)]
    assert list(results) == titles
    for result in results.values():
        assert list(result["variants"]) == ALL_WAYS
        assert {row["n"] for row in result["variants"].values()} == {2}
        phased = {name: set(row["phase_ms"]) for name, row in result["variants"].items() if "phase_ms" in row}
        assert phased == {"ours, off": PHASES, "ours, info": PHASES_OF_INFO}
        assert result["aims"] == {"ours, off / torch DDP, bucket views": 0.82, "ours, info / ours, off": 1.05}
        assert result["ratios"]["ours, off / torch DDP"] == result["variants"]["ours, off"]["median_ratio"]
        assert set(result["verdicts"].values()) <= {"met", "missed"}
        assert result["verdicts"].keys() == result["aims"].keys()
    assert printed[1] == ""
    assert all(title in printed[0] for title in titles)
    assert max(map(len, printed[0].splitlines())) <= 80


def _run_all_reduce(rank: int, *given: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        bench_all_reduce.run(bench_all_reduce.parse_arguments(given))
    return printed.getvalue()


def test_all_reduce_writes_the_calls_and_their_parts(tmp_path: Path) -> None:
    path = tmp_path / "call.json"

    printed = run_ranks(_run_all_reduce, 2, *SHORT, "--json", str(path))
    results = json.loads(path.read_text())["results"]

    calls, parts = results["call, transformer, 2 ranks"], results["parts, transformer, 2 ranks"]
    ours = [
        "ours, off, views",
        "ours, info, views",
        "ours, off, to pack",
        "ours, info, to pack",
        "ours, off, gradient_as_bucket_view=False",
    ]
    bare = ["bare all_reduce", "bare all_reduce again"]
    assert list(calls["variants"]) == [*bare, *ours, "one collective per parameter"]
    assert calls["aims"] == {"ours, off, views": 0.42, "ours, info, views": 0.55}
    assert calls["verdicts"].keys() == calls["aims"].keys()
    phased = {name: row["phase_ms"].keys() for name, row in calls["variants"].items() if "phase_ms" in row}
    assert phased == {name: PHASES_OF_INFO if ", info," in name else PHASES for name in ours}
    assert list(parts["variants"]) == [
        "bare all_reduce",
        "copy gradients into the flat tensor",
        "exchange headers",
        "divide the flat tensor",
        "norm of the flat tensor",
        "assign views to .grad",
    ]
    for row in (*calls["variants"].values(), *parts["variants"].values()):
        assert row["n"] == 2
    assert max(map(len, printed[0].splitlines())) <= 80


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


def _check_wrong(rank: int, name: str) -> str:
    ways = {name: WRONG_WAYS[name]}
    return _exit_text(lambda: _parity.check_training(ways, _small("dense"), 1, set_to_none=True))


@pytest.mark.parametrize(
    "name,count", [("does nothing", 2), ("sums", 2), ("forgets the bias on rank 0", 1), ("reduces something else", 2)]
)
def test_a_way_that_leaves_work_out_is_not_timed_on_any_rank(name: str, count: int) -> None:
    said = f"{name}: got other values than expected in {count} of 2 tensors; not timed"

    assert run_ranks(_check_wrong, 2, name) == [said] * 2


def _check_same_data(rank: int) -> str:
    workload = _workloads.Workload(
        partial(nn.Linear, 3, 2), lambda count: [torch.ones(1, 3)] * count, _workloads.mean_square
    )
    return _exit_text(lambda: _parity.check_training({}, workload, 1, set_to_none=True))


def test_data_on_which_nothing_can_be_told_is_refused() -> None:
    said = "local compute alone: 2 of 2 tensors are as if synchronised; the data does not tell ways apart"

    assert run_ranks(_check_same_data, 2) == [said] * 2


def _check_calls(rank: int) -> list[str]:
    model = nn.Linear(3, 2)

    def fill() -> None:
        model.zero_grad()
        model(torch.full((1, 3), float(rank + 1))).square().sum().backward()

    calls = (partial(_ways.average_each, model), lambda: None)
    return [_exit_text(partial(_parity.check_mean, "it", model, fill, call)) for call in calls]


def test_a_call_has_to_leave_the_mean_over_the_ranks() -> None:
    said = "it: got other values than expected in 2 of 2 tensors; not timed"

    assert run_ranks(_check_calls, 2) == [["passed", said]] * 2


def test_nothing_that_is_not_a_number_counts_as_the_same() -> None:
    nan, one = torch.tensor([float("nan"), 1.0]), torch.ones(2)

    assert _parity.find_problem("it", [one], [one], unsynchronized=False) == ""
    assert _parity.find_problem("it", [nan], [one], unsynchronized=False).startswith("it: got other values")
    assert _parity.find_problem("it", [nan], [nan], unsynchronized=False).startswith("it: got other values")


def _batches_of_all(rank: int) -> list[Any]:
    return [torch.stack(_ways.own_batches(_small("dense"), 2, number=number)).sum().item() for number in (0, 1, 2, 0)]


def test_ranks_and_steps_have_data_of_their_own_and_the_same_each_time() -> None:
    sums = run_ranks(_batches_of_all, 2)

    assert [own[0] for own in sums] == [own[3] for own in sums]
    assert len({value for own in sums for value in own}) == 6


def test_the_bare_all_reduce_carries_the_bytes_of_the_gradients() -> None:
    assert _ways.flat_like(nn.Linear(3, 2)).tolist() == [0.0] * 8


def test_the_parts_of_a_call_copy_and_assign_every_gradient() -> None:
    model = nn.Linear(1, 2)
    parameters, flat = list(model.parameters()), _ways.flat_like(model)
    views = bench_all_reduce._views(flat, parameters)
    model.weight.grad, model.bias.grad = torch.tensor([[1.0], [2.0]]), torch.tensor([3.0, 4.0])

    bench_all_reduce._copy(views, parameters)
    bench_all_reduce._assign(views, parameters)
    flat.mul_(2)

    assert (model.weight.grad.tolist(), model.bias.grad.tolist()) == ([[2.0], [4.0]], [6.0, 8.0])


def test_what_makes_no_sense_for_a_model_is_left_out() -> None:
    left_out = {name: set(ALL_WAYS) - set(_ways.ways_for(name)) for name in _workloads.WORKLOADS}

    assert list(_ways.WAYS) == ALL_WAYS
    assert left_out == {
        "transformer": set(),
        "resnet": set(),
        "small": set(),
        "tiny": {"one collective per parameter"},
        "embedding": {"torch DDP, static graph", "local compute + bare all_reduce", "local compute alone"},
        "sparse embedding": {"torch DDP, bucket views", "local compute + bare all_reduce"},
    }


def test_aims_are_those_of_a_model_of_its_micro_batches_and_of_two_ranks() -> None:
    few, many = (bench_step.aims_for("transformer", update_freq, 2) for update_freq in (3, 16))

    assert (few["ours, info / ours, off"], many["ours, info / ours, off"]) == (1.05, 1.03)
    assert bench_step.aims_for("resnet", 1, 2) == {"ours, off / torch DDP": 0.90}
    assert bench_step.aims_for("small", 1, 2) == bench_step.aims_for("transformer", 1, 4) == {}


def test_a_ratio_is_the_median_of_those_of_the_rounds() -> None:
    own = _measure.Variant("own", lambda: None, seconds=[1.0, 6.0, 20.0])
    other = _measure.Variant("other", lambda: None, seconds=[2.0, 2.0, 10.0])

    # 0.5, 3 and 2; the quotient of the medians would be 3, and the ratio of the last round 2.
    assert _measure.median_ratio([other, own], "own", "other") == 2.0
    assert _measure.summarize([other, own])["own"]["median_ratio"] == 2.0
    assert _measure.median_ratio([other, own], "other", "own") == 0.5


def test_an_aim_is_met_up_to_itself_and_by_no_nan() -> None:
    ratios = {"at": 1.05, "above": 1.051, "nan": float("nan"), "without": 9.0}

    told = _measure.verdicts(ratios, {"at": 1.05, "above": 1.05, "nan": 1.05})

    assert told == {"at": "met", "above": "missed", "nan": "missed"}


def test_phases_are_medians_in_ms_and_one_that_did_not_happen_took_no_time() -> None:
    phases = [{"plan": 0.001, "pack": 0.5}, {"plan": 0.003}, {"plan": 0.002}]
    variant = _measure.Variant("ours", lambda: None, seconds=[1.0, 1.0, 1.0], phases=phases)
    without = _measure.Variant("bare", lambda: None, seconds=[1.0, 1.0, 1.0])

    summary = _measure.summarize([variant, without])

    assert summary["ours"]["phase_ms"] == {"plan": 2.0, "pack": 0.0}
    assert "phase_ms" not in summary["bare"]


def test_processor_time_is_compared_within_its_round_like_time() -> None:
    reference = _measure.Variant("one", lambda: None, seconds=[1.0, 1.0, 1.0], cpu_seconds=[1.0, 2.0, 8.0])
    variant = _measure.Variant("two", lambda: None, seconds=[1.0, 1.0, 1.0], cpu_seconds=[3.0, 8.0, 16.0])

    row = _measure.summarize([reference, variant])["two"]

    assert (row["cpu_ms"], row["cpu_ratio"]) == (8000.0, 3.0)


def test_columns_stay_apart_however_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    row = {"median_ms": 75_300.831, "p90_ms": 83_643.09, "median_ratio": 1234.5678}

    _measure.print_table("step", {"ours, off, gradient_as_bucket_view=False": row})

    *_, line = capsys.readouterr().out.splitlines()
    assert line.split()[-3:] == ["75300.83ms", "83643.09ms", "1234.568"]
    assert len(line) <= 80


class _Held:
    """Something that two attributes hold to, as wrappers and hooks do each other."""

    def __init__(self) -> None:
        self.itself = self


def _return_record(held: _Held, record: SyncRecord) -> SyncRecord:
    assert held.itself is held
    return record


def _build_thrice(rank: int) -> tuple[list[int], list[list[float]], int]:
    alive: list[weakref.ref[_Held]] = []
    alive_at_build = []

    def build() -> list[Any]:
        alive_at_build.append(sum(held() is not None for held in alive))
        variants = []
        for name in ("one", "two"):
            held = _Held()
            alive.append(weakref.ref(held))
            record = SyncRecord(1, True, seconds={"plan": float(len(alive_at_build))})
            variants.append(_measure.Variant(name, partial(_return_record, held, record)))
        return variants

    variants = _measure.measure(build, argparse.Namespace(repeats=3, rounds=2, warm_up=1))
    plans = [[seconds["plan"] for seconds in variant.phases] for variant in variants]
    return alive_at_build, plans, len(variants[0].seconds)


def test_one_building_is_in_memory_at_a_time_and_all_of_them_count() -> None:
    ((alive_at_build, plans, count),) = run_ranks(_build_thrice, 1)

    assert alive_at_build == [0, 0, 0]
    assert plans == [[1.0, 1.0, 2.0, 2.0, 3.0, 3.0]] * 2
    assert count == 6


def test_quick_is_short_for_options_and_what_else_is_given_counts() -> None:
    quick, changed, full = (
        bench_step.parse_arguments(given) for given in (["--quick"], ["--rounds", "5", "--quick"], [])
    )

    assert (quick.models, quick.update_freq, quick.set_to_none) == (["transformer"], [1, 4], ["yes"])
    assert (quick.rounds, changed.rounds) == (4, 5)
    assert full.models == ["transformer", "resnet", "small", "tiny", "embedding", "sparse embedding"]
    assert (full.update_freq, full.set_to_none, full.repeats * full.rounds) == ([1, 4, 16], ["yes", "no"], 40)


def _run_alone(rank: int) -> list[str]:
    return [
        _exit_text(lambda bench=bench: bench.run(bench.parse_arguments([]))) for bench in (bench_step, bench_all_reduce)
    ]


def test_a_single_rank_has_nothing_to_compare() -> None:
    ((step, call),) = run_ranks(_run_alone, 1)

    assert step == "nothing to synchronise: got 1 rank, expected 2 or more; raise --nproc-per-node"
    assert call == "nothing to reduce: got 1 rank, expected 2 or more; raise --nproc-per-node"
