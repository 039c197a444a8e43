"""Observation of a wrapper and its calls: print(model), on_sync(), log records, profiler ranges."""

import contextlib
import io
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.profiler import ProfilerActivity, profile

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel, SyncRecord
from tests.helpers.cases import wrap_module
from tests.helpers.comm_hooks import mean
from tests.helpers.paths import ROOT, python_blocks
from tests.helpers.ranks import run_ranks
from tests.helpers.recorded import Recorded
from tests.helpers.shared_jobs import on_ranks
from tests.helpers.small_models import add_gradients, gradient_values, step, wrap
from tests.helpers.transports import HOST


def _printed(rank: int) -> list[str]:
    parameters = [torch.zeros(3, 2), torch.zeros(1), torch.zeros(2, dtype=torch.float64), torch.zeros(9)]
    model = wrap_module(parameters, buffer_size=5, reduce_dtype=torch.bfloat16, ignore=["3"])
    texts = [repr(model)]
    dist.destroy_process_group()
    return [*texts, repr(model)]


def test_print_shows_layout_bytes_group_transport_and_checks(transport: str) -> None:
    for rank, (text, afterwards) in enumerate(run_ranks(_printed, 2)):
        assert text.splitlines()[:7] == [
            "LegacyDistributedDataParallel(",
            "  bucket 0: cpu float32, 2 tensors, 7 elements, 28 bytes",
            "  bucket 1: cpu float64, 1 tensors, 2 elements, 16 bytes",
            f"  group: rank {rank} of 2, gloo",
            "  transport: host (from the first call on)"
            if transport == HOST
            else '  transport: gloo (transport="gloo")',
            "  buffer_size=5, reduce_dtype=torch.bfloat16, ignore=frozenset({'3'}), "
            "checks=Checks(uneven='allow', nonfinite='ignore')",
            "  (module): ParameterList(",
        ]
        assert "group: none available" in afterwards


@pytest.mark.usefixtures("alone")
def test_a_model_without_trainable_parameters_can_be_printed() -> None:
    assert "no trainable parameters" in repr(LegacyDistributedDataParallel(nn.ReLU()))


@pytest.mark.usefixtures("alone")
def test_print_shows_a_hook_and_still_the_buckets() -> None:
    model = wrap()
    model.register_comm_hook(None, allreduce_hook)
    assert "bucket 0: cpu float32" in model.extra_repr()
    assert "comm_hook=torch.distributed.algorithms.ddp_comm_hooks.default_hooks.allreduce_hook" in model.extra_repr()


# 1 and 2 give 1.5; then 1 in the block and 1 behind it, on both, for 2 items each.
_OF_SECOND = [("second", None, [1.5]), ("second", 4, [1.0])]


@on_ranks(2, [[("first", 1, rank), *_OF_SECOND] for rank in range(2)])
def test_callbacks_see_every_call_with_the_gradients_it_left(rank: int) -> list[Any]:
    model, seen = wrap(), []
    first = model.on_sync(lambda record: seen.append(("first", record.call, record.rank)))
    model.on_sync(lambda record: seen.append(("second", record.sample_size, list(gradient_values(model).values()))))
    step(model, 1.0 + rank)
    with model.no_sync():
        step(model, 1.0)
    first.remove()
    add_gradients(model, 1.0)
    model.all_reduce(sample_size=2)
    with pytest.raises(TypeError, match=r"callback is not callable: got 'print', expected callback\(record\)"):
        model.on_sync("print")
    return seen


@on_ranks(2, [[1.5, 1.5, 2.5]] * 2)
def test_an_error_in_a_callback_leaves_a_call_that_is_over(rank: int) -> Any:
    model = wrap()

    def object_to(record: SyncRecord) -> None:
        raise KeyError(record.call)

    found = []
    for callback, error, text in (
        (object_to, KeyError, "1"),
        (lambda _: model.all_reduce(), LegacyDDPError, r"inside an on_sync\(\) callback"),
    ):
        handle = model.on_sync(callback)
        with pytest.raises(error, match=text):
            step(model, 1.0 + rank)
        handle.remove()
        found += gradient_values(model).values()
    return [*found, step(model, 2.0 + rank)]


def _profiled(rank: int, *, hooked: bool) -> list[str]:
    warnings.simplefilter("ignore")  # kineto's, about this machine
    model = wrap()
    if hooked:
        model.register_comm_hook(None, mean)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(model, 1.0)
    return [event.name for event in profiler.events() if event.name.startswith("legacy_ddp")]


@pytest.mark.parametrize(
    "transport, hooked, ranges",
    [
        ("host", False, {"payload::sum cpu float32"}),
        ("gloo", False, {"payload::start cpu float32", "payload::finish cpu float32"}),
        ("gloo", True, {"hook", "hook::bucket 0"}),
    ],
    indirect=["transport"],
)
def test_the_profiler_shows_phases_and_buckets_by_name(transport: str, hooked: bool, ranges: set[str]) -> None:
    ranges |= {"plan", "pack", "digest", "agree", "payload", "alias"}
    for names in run_ranks(partial(_profiled, hooked=hooked), 2):
        assert set(names) == {f"legacy_ddp::all_reduce()::{name}" for name in ranges}


# docs/logging.md

PAGE = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8")
BLOCKS = python_blocks("docs/logging.md")
*_, PROFILER = BLOCKS
(JSON_LINES,) = [block for block in BLOCKS if "import json" in block]
(RECORDER,) = [block for block in BLOCKS if "import Recorder" in block]


def _written(rank: int, folder: Path) -> list[tuple[object, int]]:
    scope: dict[str, Any] = {"torch": torch, "model": wrap()}
    exec(JSON_LINES.replace('"calls.jsonl"', repr(str(folder / f"{rank}.jsonl"))), scope)
    for _ in range(2):
        step(scope["model"], 1.0)
    if "lines" not in scope:
        return []
    scope["lines"].close()
    facts = [json.loads(line) for line in (folder / f"{rank}.jsonl").read_text().splitlines()]
    return [(record["call"], len(record["rows"])) for record in facts]


def test_the_recipe_for_json_writes_a_line_per_call_on_one_rank(tmp_path: Path) -> None:
    assert run_ranks(_written, 2, tmp_path) == [[(1, 2), (2, 2)], []]


def _recorded(rank: int, folder: Path) -> float:
    model = wrap()
    scope = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "batches": [1.0, 2.0]}
    exec(
        RECORDER.replace('"runs/1"', repr(str(folder))),
        {**scope, "loss_of": lambda model, batch: (batch + rank) * model(torch.ones(1, 2)).sum() / 64},
    )
    trace = Recorded(folder, rank)
    assert [list(trace.calls[step].metrics) for step in (1, 2)] == [["loss"]] * 2
    assert [list(trace.logged[step]) for step in (1, 2)] == [["own_loss", "lr"]] * 2
    return float(trace.calls[1].metrics["loss"]) - float(trace.logged[1]["own_loss"])


def test_the_recipe_for_the_recorder_writes_metrics_and_values_of_each_rank(tmp_path: Path) -> None:
    """What the sum has beyond the own loss is the loss of the other rank: twice or half of the own one."""
    first, second = run_ranks(_recorded, 2, tmp_path)
    assert first == pytest.approx(2 * second)


@pytest.mark.unsimulated("its operations resize their results")
@on_ranks(2, [True] * 2)
def test_the_recipe_for_the_profiler_prints_the_ranges(rank: int) -> bool:
    warnings.simplefilter("ignore")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        exec(PROFILER, {"torch": torch, "model": LegacyDistributedDataParallel(nn.Linear(10, 1))})
    return "legacy_ddp::all_reduce()::agree" in said.getvalue()


def _printed_in_the_page(rank: int) -> str:
    return repr(LegacyDistributedDataParallel(nn.Linear(10, 1)))


@pytest.mark.parametrize("transport", ["host"], indirect=True)
def test_the_page_shows_the_output_of_print(transport: str) -> None:
    shown = run_ranks(_printed_in_the_page, 2)[0]
    assert "".join(f"    {line}\n" for line in shown.splitlines()) in PAGE
