"""Operations of a step in the file of a rank: written, read back, counted, and refused if damaged."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legacy_ddp import TraceError
from legacy_ddp.debug._operations.operation import Operation, Value
from legacy_ddp.debug._trace.read import RankTrace, open_run
from legacy_ddp.debug._trace.records import Writer, declaration_of, digests_of, encode
from legacy_ddp.debug._trace.summary import lines, summarise
from tests.helpers.traces import environment

DIGESTS = st.integers(0, 2**64 - 1).map("{:016x}".format)
VALUES = st.builds(Value, st.sampled_from(["float32 (8, 10)", "int64 ()"]), st.text(max_size=9), st.none() | DIGESTS)
NAMED_INPUTS = st.lists(st.tuples(st.text(max_size=9), VALUES), max_size=3)
OPERATIONS = st.builds(
    lambda named, **given: Operation(
        **given, parameters=tuple([name for name, _ in named]), inputs=tuple([value for _, value in named])
    ),
    named=NAMED_INPUTS,
    name=st.sampled_from(["aten::mm", "aten::add.Tensor", "own::op"]),
    stage=st.sampled_from(["forward", "backward"]),
    micro_batch=st.integers(0, 3),
    module=st.text(max_size=9),
    outputs=st.lists(VALUES, max_size=3).map(tuple),
    settings=st.text(max_size=9),
    generator=st.just("") | DIGESTS,
)


def operation(digest: str | None = "0" * 16, *, micro_batch: int = 1, name: str = "aten::mm") -> Operation:
    value = Value("float32 (2, 2)", "", digest)
    return Operation(
        name, "forward", micro_batch, "layers.0", ("", "layers.0.weight"), (value, value), (value,), "", ""
    )


def write(folder: Path, steps: dict[int, Sequence[Operation]], rank: int = 0, world_size: int = 1) -> Path:
    writer = Writer(folder, environment(rank, world_size))
    for step, operations in steps.items():
        writer.operations(step, operations)
    writer.close(max(steps), "closed")
    return writer.path


@given(steps=st.dictionaries(st.integers(1, 9), st.lists(OPERATIONS, min_size=1, max_size=6), min_size=1))
def test_operations_are_read_as_written(steps: dict[int, list[Operation]], tmp_path_factory: Any) -> None:
    path = write(tmp_path_factory.mktemp("trace"), dict(sorted(steps.items())))

    with RankTrace(path) as trace:
        assert trace.damage == ""
        assert {step: list(trace.operations(step)) for step in trace.steps} == steps
        assert trace.operation_counts == {step: len(found) for step, found in steps.items()}
        assert trace.operations(10) == ()


def test_an_operation_is_declared_once(tmp_path: Path) -> None:
    path = write(tmp_path, {1: [operation()] * 3, 2: [operation("f" * 16)], 3: [operation(None)]})

    found = [json.loads(line) for line in path.read_bytes().splitlines()]

    assert [item["line"] for item in found[1:]] == [
        *("operation", "operations"),
        "operations",
        *("operation", "operations"),
        "end",
    ]
    assert found[2]["numbers"] == [0, 0, 0]
    assert found[2]["digests"] == "0" * 16 * 9


def test_a_step_has_a_line_for_each_micro_batch(tmp_path: Path) -> None:
    path = write(tmp_path, {4: [operation(micro_batch=1)] * 2 + [operation(micro_batch=2)]})

    with RankTrace(path) as trace:
        assert [item.micro_batch for item in trace.operations(4)] == [1, 1, 2]
        assert trace.operation_counts == {4: 3}
    assert path.read_bytes().count(b'"line":"operations"') == 2


@pytest.mark.parametrize("numbers, digests", [([0], "0" * 16), ([7], "0" * 48)])
def test_operations_that_no_recorder_writes_are_an_error_of_their_step(
    numbers: list[int], digests: str, tmp_path: Path
) -> None:
    path = write(tmp_path, {1: [operation()]})
    kept = path.read_bytes().partition(b'{"line":"operations"')[0]
    members = {"line": "operations", "step": 1, "micro_batch": 1, "numbers": numbers, "digests": digests}
    path.write_bytes(kept + encode(members, kept.count(b"\n") + 1))

    with RankTrace(path) as trace, pytest.raises(TraceError, match="a line of step 1 cannot be read: it has contents"):
        trace.operations(1)


def test_a_torn_line_of_operations_ends_the_trace_before_its_step(tmp_path: Path) -> None:
    path = write(tmp_path, {1: [operation()], 2: [operation()] * 5})
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b'"step":2') + 60])

    with RankTrace(path) as trace:
        assert (trace.torn, list(trace.steps), trace.operation_counts) == (True, [1], {1: 1})


def test_digests_are_in_the_order_of_inputs_outputs_and_generator() -> None:
    first, second, third, fourth = (f"{number:016x}" for number in range(4))
    values = [Value("float32 ()", "", digest) for digest in (first, None, second, third)]
    drawn = Operation("aten::bernoulli", "forward", 1, "", (), tuple(values[:2]), tuple(values[2:]), "", fourth)

    assert digests_of(drawn) == first + second + third + fourth
    assert declaration_of(drawn).digested == (True, False, True, True)


def test_the_summary_says_which_steps_hold_operations_and_how_many(tmp_path: Path) -> None:
    one = [operation()]
    write(tmp_path, {1: one, 2: one * 1200, 4: one * 3}, rank=0, world_size=2)
    write(tmp_path, {1: one * 2, 2: one * 1200}, rank=1, world_size=2)

    found = summarise(open_run(tmp_path))

    assert found.operations == ((1, 2), (2, 1200), (4, 3))
    assert found.as_json()["operations"] == ((1, 2), (2, 1200), (4, 3))
    text = " ".join(line.strip() for line in lines(found))
    assert "operations of forward and backward: steps 1-2, step 4 (2 to 1,200 a step and rank)" in text


def test_a_summary_without_operations_says_nothing_of_them(tmp_path: Path) -> None:
    write(tmp_path, {1: []})

    assert "operations" not in "".join(lines(summarise(open_run(tmp_path))))
