"""The text and the properties of a report of replicas. Pure."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as some

from legacy_ddp.debug import ElementDifference, ReplicaDifference, ReplicaReport

Values = tuple[tuple[str, tuple[int, ...]], ...]
COMPARED = {"parameters": 20, "buffers": 1, "gradients": 0, "optimizer": 1}
TENSORS = (("float32 (2,) 00000000000000aa", (0, 2)), ("float32 (2,) 00000000000000bb", (1,)))
NO_TENSOR = (("float32 (2,) 00000000000000aa", (0, 2)), ("nothing", (1,)))
STEPS = (("float32 () 21.0", (0, 2)), ("float32 () 1.0", (1,)))
PARAMETERS = ("'a'", "'b of \\'c\\''", '"d\'s"')
ELEMENTS = {1: ElementDifference(1, 2, (0,), ("1.0", "0.0"), 1.0, (0,), "some", "no known pattern")}


def _report(*differences: ReplicaDifference, **fields: object) -> ReplicaReport:
    return ReplicaReport("check_replicas() call 3", 3, COMPARED, differences, **fields)  # type: ignore[arg-type]


def _parameters(count: int, *, compared: int = 0) -> list[ReplicaDifference]:
    """So many differing parameters, of which the first ones are compared by element."""
    elements = [ELEMENTS if index < compared else {} for index in range(count)]
    return [
        ReplicaDifference(f"parameter 'p{index:02d}'", TENSORS, "parameters", found)
        for index, found in enumerate(elements)
    ]


@pytest.mark.parametrize(
    "count, compared, other, last, shown",
    [
        (10, 0, "", "  parameter 'p09', float32 (2,): rank 1 against ranks 0, 2", 10),
        (13, 0, "", "  ... 3 more", 10),
        # Where all differ, the names of the first ten do not help.
        (20, 2, "", "  ... and the other 18: all parameters differ", 2),
        (20, 0, "", "  ... 10 more", 10),
        (20, 2, "buffers", "  ... 11 more", 10),
    ],
)
def test_differences_beyond_ten_are_counted(count: int, compared: int, other: str, last: str, shown: int) -> None:
    others = [ReplicaDifference("buffer 'b'", TENSORS, other)] if other else []
    lines = str(_report(*_parameters(count, compared=compared), *others)).splitlines()

    assert lines[-1] == last
    assert sum("parameter 'p" in line for line in lines) == shown
    assert f"{count} of 20 parameters" in " ".join(lines)


@pytest.mark.parametrize(
    "name, kind, parameter",
    [
        ("parameter '0.weight'", "parameters", "0.weight"),
        ("gradient of '0.weight'", "gradients", "0.weight"),
        ("momentum_buffer of '0.weight'", "optimizer", "0.weight"),
        ("buffer '1.running_mean'", "buffers", None),
        ("lr of parameter group 0", "optimizer", None),
    ],
)
def test_a_difference_knows_its_parameter(name: str, kind: str, parameter: str | None) -> None:
    assert ReplicaDifference(name, TENSORS, kind).parameter == parameter


def test_a_name_is_never_broken() -> None:
    assert f"'{'x' * 100}'," in str(ReplicaDifference(f"parameter '{'x' * 100}'", TENSORS, "parameters"))


def test_groups_of_ranks_with_equal_generators_end_the_text() -> None:
    text = " ".join(str(_report(generators=((0, 2), (1, 3)))).split())

    assert text.endswith("random generators are equal on ranks 0, 2 and on ranks 1, 3; they need not agree")


# Entries of optimizers


def _every(key: str, values: Values, holders: Sequence[str] = PARAMETERS) -> list[ReplicaDifference]:
    return [ReplicaDifference(f"{key} of {holder}", values, "optimizer") for holder in holders]


def _lines(*differences: ReplicaDifference, **total: int) -> list[str]:
    """The lines about entries. ``total``: of the parameters, or parameter groups, with the entry."""
    units = {"lr": "parameter group"}
    counts = {(key, units.get(key, "parameter")): count for key, count in total.items()}
    text = str(_report(*differences, entry_counts=counts)).partition("why:")[2]
    return " ".join(text.split()).replace(" optimizer", "\noptimizer").splitlines()


@pytest.mark.parametrize(
    "differences, line",
    [
        (_every("step", STEPS), "optimizer state: `step` is 1 on rank 1, 21 on ranks 0, 2, in 3 of 4 parameters"),
        (_every("m", TENSORS), "optimizer state: `m` differs in 3 of 4 parameters: rank 1 against ranks 0, 2"),
        (_every("m", NO_TENSOR), "optimizer state: `m` is missing on rank 1, in 3 of 4 parameters"),
        # Of nested values, the outermost key.
        (_every("3 in m", TENSORS), "optimizer state: `m` differs in 3 of 4 parameters: rank 1 against ranks 0, 2"),
        (
            [*_every("step", STEPS, ["'a'"]), *_every("step", (("float32 () 5.0", (0, 2)), STEPS[1]), ["'b'"])],
            "optimizer state: `step` differs in 2 of 4 parameters: rank 1 against ranks 0, 2",
        ),
        (
            [*_every("m", TENSORS, ["'a'"]), *_every("m", ((TENSORS[0][0], (0, 1)), (TENSORS[1][0], (2,))), ["'b'"])],
            "optimizer state: `m` differs in 2 of 4 parameters: rank 1 against ranks 0, 2; rank 2 against ranks 0-1",
        ),
        (
            _every("lr", tuple((str(rank), (rank,)) for rank in range(64)), ["parameter group 0", "parameter group 1"]),
            "optimizer: `lr` is 63 on rank 63, 62 on rank 62, 61 on rank 61, 0 on rank 0, 60 more values, in 2 of 4 "
            "parameter groups",
        ),
        (
            _every("x", (("float64 () 1.0", (0,)), ("float32 () 1.0", (1,)))),
            "optimizer state: `x` is float32 () 1 on rank 1, float64 () 1 on rank 0, in 3 of 4 parameters",
        ),
    ],
)
def test_a_kind_of_entries_is_one_line(differences: list[ReplicaDifference], line: str) -> None:
    assert _lines(*differences, step=4, m=4, lr=4, x=4) == [line]


def test_short_values_come_before_tensors_and_hyperparameters_before_state() -> None:
    differences = [
        *_every("exp_avg", TENSORS),
        *_every("exp_avg_sq", NO_TENSOR),
        *_every("step", STEPS),
        *_every("lr", (("0.1", (0,)), ("0.2", (1, 2))), ["parameter group 0", "parameter group 1"]),
    ]

    assert [line.split("`")[1] for line in _lines(*differences)] == ["lr", "step", "exp_avg_sq", "exp_avg"]


@given(
    some.lists(some.sampled_from(["lr", "step", "exp_avg", "very_long_key_of_a_state" * 2]), min_size=1, unique=True),
    some.integers(1, 300),
    some.integers(1, 3),
    some.integers(2, 40),
    some.integers(2, 40),
)
def test_the_text_is_short_whatever_differs(keys: list[str], params: int, optimizers: int, ranks: int, n: int) -> None:
    differences = []
    for key in keys:
        values = tuple((f"0.{rank % n}", (rank,)) for rank in range(ranks))
        holders = [f"parameter group {i}" if key == "lr" else f"'block.{i}.weight'" for i in range(params)]
        names = [f"optimizer {k}: {key} of {holder}" for k in range(optimizers) for holder in holders]
        differences += [ReplicaDifference(name, values, "optimizer") for name in names]
    lines = str(_report(*differences)).splitlines()

    assert all(len(line) <= 80 for line in lines)
    assert len(lines) <= 4 + 4 * len(keys)
