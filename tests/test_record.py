"""Records of calls, and the warning about uneven work."""

import json
import re
from functools import partial
from math import nan
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import Checks, DesyncError, LegacyDistributedDataParallel, RankRow, SyncRecord, all_reduce_gradients
from tests.helpers import logged_warnings
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import add_gradients, gradient_values, wrap

# What a call says about itself


def _records(rank: int) -> tuple[list[SyncRecord], list[float | None]]:
    model = wrap(checks=Checks(uneven="allow"))
    records, grads = [], []
    for arguments in ({}, {"sample_size": 3 * rank}, {"skip": rank == 2}, {"skip": True}):
        model.zero_grad()
        for _ in range(rank + 1):
            add_gradients(model, rank + 1)
        records.append(model.all_reduce(**arguments))
        grads.append(gradient_values(model)["weight"])
        model.broadcast_parameters()  # has a count of its own
    return records, grads


def test_the_record_says_what_the_call_did() -> None:
    for records, grads in run_ranks(_records, 3):
        # rank r brings (r+1)²; rank 0 is left out of the second call, rank 2 of the third
        assert grads == [pytest.approx(14 / 3), pytest.approx(13 / 9), 2.5, None]
        plain, weighted, without_rank_2, _ = records
        facts = [(r.call, r.synchronized, r.skipped, r.sample_size, r.divisor, r.skipped_ranks) for r in records]
        assert facts == [
            (1, True, False, None, 3, ()),
            (2, True, False, 9, 9, (0,)),
            (3, True, False, None, 2, (2,)),
            (4, True, True, None, 0, (0, 1, 2)),
        ]
        assert [record.payload_bytes for record in records] == [8, 8, 8, 0]
        for record in records:
            phases = {"plan", "pack", "digest", "agree"} | ({"payload", "alias"} if not record.skipped else {"alias"})
            assert record.seconds.keys() == phases
            assert all(0 <= seconds < 60 for seconds in record.seconds.values())
            assert [row.rank for row in record.rows] == [0, 1, 2]
            assert all(row.seconds_waited >= 0 for row in record.rows)
        assert [row.took_part for row in weighted.rows] == [False, True, True]
        assert [row.took_part for row in without_rank_2.rows] == [True, True, False]
        assert [row.sample_size for row in weighted.rows] == [0, 3, 6]
        assert [row.sample_size for row in plain.rows] == [None] * 3
        assert [row.micro_batches for row in plain.rows] == [1, 2, 3]
        # rank r adds r+1 to both elements r+1 times
        norms = [(rank + 1) ** 2 * 2**0.5 for rank in range(3)]
        assert [row.local_norm for row in plain.rows] == pytest.approx(norms, rel=1e-6)
        assert all(row.finite for row in plain.rows)


def _printed(rank: int) -> tuple[list[str], str]:
    model = wrap(checks=Checks(uneven="allow"))
    add_gradients(model, rank + 1)
    if rank:
        add_gradients(model, rank + 1)
    with model.no_sync():
        nothing = str(model.all_reduce())
    return str(model.all_reduce(sample_size=1000 * rank)).splitlines(), nothing


def test_a_record_prints_a_line_for_the_call_and_a_line_for_each_rank(transport: str) -> None:
    for lines, nothing in run_ranks(_printed, 3):
        assert nothing == "no call: inside no_sync()"
        head, *rows = [re.sub(r" +", " ", re.sub(r"\b[\d,]+\.\d m?s\b", "TIME", line)).strip() for line in lines]
        assert re.sub(r"\(\w+ ", "(PHASE ", head) == (
            f"call 1: mean over 3,000 samples, 8 bytes by {transport}, TIME (PHASE TIME)"
        )
        # rank r adds r+1 to both elements, once on rank 0, which takes no part, and twice elsewhere
        assert rows == [
            "rank local norm micro-batches samples waited before",
            "0 0 0 TIME took no part",
            f"1 {4 * 2**0.5:.6g} 2 1,000 TIME",
            f"2 {6 * 2**0.5:.6g} 2 2,000 TIME",
        ]


def _record_of(rows: list[RankRow], **facts: Any) -> SyncRecord:
    record = SyncRecord(call=20, synchronized=True, **facts)
    vars(record)["rows"] = tuple(rows)  # in the place of its cached property
    return record


@pytest.mark.parametrize(
    "facts, line",
    [
        ({"divisor": 4}, "call 20: mean over 4 ranks"),
        ({"divisor": 1}, "call 20: mean over 1 rank"),
        ({"divisor": 0, "skipped": True}, "call 20: no rank took part, every .grad is None"),
        (
            {"divisor": 1_048_576, "sample_size": 1_048_576, "payload_bytes": 380_000_000, "transport": "host"},
            "call 20: mean over 1,048,576 samples, 380 MB by host",
        ),
        (
            {"divisor": 2, "seconds": {"pack": 0.0125, "agree": 1.25, "alias": 0.0375}},
            "call 20: mean over 2 ranks, 1.3 s (agree 1.2 s)",
        ),
    ],
)
def test_the_line_of_a_record_says_what_was_divided_moved_and_slow(facts: dict[str, Any], line: str) -> None:
    assert str(_record_of([], **facts)) == line


def test_the_metrics_of_a_record_are_printed_in_lines_of_80_columns() -> None:
    metrics = {"loss": 12.5, "correct": 57.0, "a name\nof two lines": 1e300}

    assert str(_record_of([], divisor=2, metrics=metrics)).splitlines() == [
        "call 20: mean over 2 ranks",
        "  metrics, summed over the ranks: loss 12.5, correct 57, a name\\nof two lines",
        "    1e+300",
    ]


def test_a_record_of_many_ranks_prints_the_first_ranks_and_the_ranks_to_look_at() -> None:
    # Rank 700 has a NaN, and the other ranks waited for rank 900.
    rows = [RankRow(r, nan if r == 700 else 1.5, r != 700, 8, None, True, 0.5 * (r != 900)) for r in range(1000)]

    text = str(_record_of(rows, divisor=1000, payload_bytes=380_000_000, transport="host", seconds={"agree": 0.25}))

    head, _, *lines, more = text.splitlines()
    assert head == "call 20: mean over 1,000 ranks, 380 MB by host, 250.0 ms (agree 250.0 ms)"
    assert [int(line.split()[0]) for line in lines] == [*range(14), 700, 900]
    assert (lines[-2].split(), lines[-1].split()) == (
        ["700", "nan", "8", "500.0", "ms"],
        ["900", "1.5", "8", "0.0", "ms"],
    )
    assert more == "  ... 984 more ranks"
    assert max(map(len, text.splitlines())) <= 80
    assert "SyncRecord(call=20" in repr(_record_of([]))


def _as_dicts(rank: int) -> list[dict[str, object]]:
    model = wrap(checks=Checks(nonfinite="ignore"))
    model.module.weight.grad = torch.tensor([[3.0, torch.nan if rank == 1 else 4.0]])
    with model.no_sync():
        nothing = model.all_reduce()
    metrics = {"loss": 0.5, "worst": torch.inf, "none": torch.nan, "least": -torch.inf}
    return [record.as_dict() for record in (nothing, model.all_reduce(sample_size=2 + rank, metrics=metrics))]


def test_a_record_as_a_dict_is_valid_json_also_with_nan_and_infinity(transport: str) -> None:
    for rank, (nothing, facts) in enumerate(run_ranks(_as_dicts, 2)):
        assert json.loads(json.dumps([nothing, facts], allow_nan=False)) == [nothing, facts]
        assert {key: nothing[key] for key in ("call", "synchronized", "rows")} == {
            "call": 0,
            "synchronized": False,
            "rows": [],
        }
        seconds, rows = facts.pop("seconds"), facts.pop("rows")
        assert facts == {
            "call": 1,
            "synchronized": True,
            "skipped": False,
            "sample_size": 5,
            "divisor": 5,
            "skipped_ranks": [],
            "payload_bytes": 8,
            "transport": transport,
            "rank": rank,
            "metrics": {"least": "-inf", "loss": 1.0, "none": "nan", "worst": "inf"},
        }
        assert all(type(value) is float for value in seconds.values())
        times = ("seconds_waited", "data_seconds", "forward_seconds", "backward_seconds")
        assert all(type(row.pop(name)) is float for row in rows for name in times)
        same = {"micro_batches": 0, "took_part": True, "leaves": 0}
        assert rows == [
            {"rank": 0, "local_norm": 5.0, "finite": True, "sample_size": 2, **same},
            {"rank": 1, "local_norm": "nan", "finite": False, "sample_size": 3, **same},
        ]


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.half_ = nn.Parameter(torch.ones(5, dtype=torch.float16))
        self.single_ = nn.Parameter(torch.ones(3))
        self.double_ = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.complex_ = nn.Parameter(torch.ones(1, dtype=torch.complex64))
        self.unused = nn.Parameter(torch.ones(100, dtype=torch.complex128))
        self.unused_last = nn.Parameter(torch.ones(100))


def _mixed_bytes(rank: int, reduce_dtype: torch.dtype | None) -> tuple[int, float | None, float]:
    model = LegacyDistributedDataParallel(_Mixed(), reduce_dtype=reduce_dtype)
    for index, parameter in enumerate(model.parameters()):
        if index < 4:
            parameter.grad = torch.full_like(parameter, (index + 1) * (3 + 4j if parameter.is_complex() else 2))
    norm = sum(float(p.grad.abs().double().square().sum()) for p in model.parameters() if p.grad is not None) ** 0.5
    record = model.all_reduce()
    return record.payload_bytes, record.rows[rank].local_norm, norm


@pytest.mark.parametrize(
    "transport, reduce_dtype, size_bytes",
    # over gloo fp16 travels as fp32 unless asked otherwise; complex numbers as they are; unused ones not at all
    [
        ("host", None, 5 * 2 + 3 * 4 + 2 * 8 + 8),
        ("host", torch.bfloat16, 5 * 2 + 3 * 4 + 2 * 8 + 8),
        ("gloo", None, 5 * 4 + 3 * 4 + 2 * 8 + 8),
        ("gloo", torch.bfloat16, (5 + 3 + 2) * 2 + 8),
        ("gloo", torch.float64, (5 + 3 + 2) * 8 + 8),
    ],
    indirect=["transport"],
)
def test_payload_bytes_and_norm_are_those_of_the_gradients_that_travel(
    transport: str, reduce_dtype: torch.dtype | None, size_bytes: int
) -> None:
    for payload_bytes, local_norm, expected in run_ranks(_mixed_bytes, 2, reduce_dtype):
        assert payload_bytes == size_bytes
        assert local_norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "value, norm, finite", [(1e20, 2**0.5 * 1e20, True), (float("inf"), float("inf"), False), (3e38, 4.2426e38, True)]
)
def test_the_norm_of_large_gradients_does_not_overflow(value: float, norm: float, finite: bool) -> None:
    model = wrap(checks=Checks(nonfinite="raise" if finite else "ignore"))
    add_gradients(model, value)

    (row,) = model.all_reduce().rows

    assert row.local_norm == pytest.approx(norm, rel=1e-4)
    assert row.finite is finite


# Uneven work


def _uneven(rank: int, how: str) -> tuple[list[tuple[str, str]], list[float | None]]:
    """The files and texts of warnings in three calls, and the gradients."""
    model, grads = wrap(), []
    call = model.all_reduce if how == "method" else partial(all_reduce_gradients, model.module)
    for _ in range(3):
        for _ in range(1 + (rank == 2)):
            add_gradients(model, rank)
        call()
        grads.append(gradient_values(model)["weight"])
        model.zero_grad()
    return [(told.filename, told.text) for told in logged_warnings.take_all()], grads


def test_uneven_work_is_warned_of_once_and_on_rank_0_and_points_at_the_caller_and_what_the_caller_can_set() -> None:
    places = {"method": "Checks(uneven=...)", "function": "LEGACY_DDP_CHECKS=uneven=..."}
    for how, of_ranks in run_cases(_uneven, 3, {how: (how,) for how in places}).items():
        (((file, text),), *others), grads = zip(*of_ranks, strict=True)
        assert (file, others) == (__file__, [[], []])
        assert re.match(r"all_reduce\(\) call [12]\b.*: ranks bring uneven work \(warned once", text), text
        assert "micro-batches since the last call: rank 2 has 2; ranks 0-1 have 1" in text
        assert text.endswith(f"\npass sample_size= if they should, or see {places[how]}")
        assert [*grads] == [pytest.approx([(0 + 1 + 2 + 2) / 3] * 3)] * 3


@on_ranks(2, [([3.0, 3.0], [])] * 2)  # 6 + 12 over 2 + 4 items
def test_uneven_work_is_no_warning_where_items_are_counted(rank: int) -> tuple[list[float], list[str]]:
    model = wrap()
    for _ in range(1 + rank):
        add_gradients(model, 6.0)
    model.all_reduce(2 * (1 + rank))
    return model.module.weight.grad.flatten().tolist(), logged_warnings.take()


def _local_steps(rank: int, steps: tuple[int, int], clear: bool) -> list[int]:
    """Local SGD: ranks make other numbers of steps of their own between two calls."""
    model = wrap(checks=Checks(divergence="ignore"))  # no rank averages its weights
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps[rank]):
        add_gradients(model, 1.0 + rank)
        with model.no_sync():
            optimizer.step()
        optimizer.zero_grad(set_to_none=clear)
    add_gradients(model, 1.0 + rank)
    return [row.micro_batches for row in model.all_reduce().rows]


def test_gradients_that_local_steps_have_used_are_no_uneven_work() -> None:
    cases = {f"{steps}, {clear=}": (steps, clear) for steps in ((1, 3), (0, 2)) for clear in (False, True)}
    assert run_cases(_local_steps, 2, cases) == dict.fromkeys(cases, [[1, 1]] * 2)


@on_ranks(3, [((2,), 1, left, 2.0) for left in (0.0, 1.0, 4.0)])
def test_uneven_work_raises_on_all_ranks_if_asked_and_the_call_works_once_it_is_even(rank: int) -> tuple[Any, ...]:
    model = wrap(checks=Checks(uneven="raise"))
    for _ in range(1 + (rank == 2)):
        add_gradients(model, rank)
    with pytest.raises(DesyncError, match="since the last call: rank 2 has 2; ranks 0-1 have 1") as caught:
        model.all_reduce(sample_size=1)  # also where items are counted
    left = gradient_values(model)["weight"]
    if rank != 2:
        add_gradients(model, rank)
    model.all_reduce()
    return caught.value.ranks, caught.value.call, left, gradient_values(model)["weight"]
