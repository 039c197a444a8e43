"""Text and properties of a report of replicas. Pure."""

import pytest

from legacy_ddp._replicas.attribution import Verdict
from legacy_ddp._replicas.report import ReplicaDifference, ReplicaReport

COMPARED = {"parameters": 20, "buffers": 1, "gradients": 0, "optimizer": 1}
VERDICT = Verdict("step", "the step() after call 3", "rank 1 against rank 0", "another learning rate", (1,))
HOLDERS = (("float32 (2,) 00000000000000aa", (0, 2)), ("float32 (2,) 00000000000000bb", (1,)))


def _difference(name: str = "parameter 'a'", kind: str = "parameters") -> ReplicaDifference:
    return ReplicaDifference(kind, name, HOLDERS)


def _report(*differences: ReplicaDifference, verdict: Verdict = VERDICT) -> ReplicaReport:
    return ReplicaReport("check_replicas() call 3", 3, COMPARED, differences, verdict)


def test_identical_replicas_are_one_line_of_what_was_compared() -> None:
    report = ReplicaReport("check_replicas() call 3", 2, COMPARED)

    assert report.identical
    expected = "check_replicas() call 3: replicas are identical: 2 ranks, 20 parameters, 1 buffer, 1 optimizer entry"
    assert " ".join(str(report).split()) == expected


def test_replicas_with_another_past_are_not_identical() -> None:
    report = _report()

    assert not report.identical
    assert "replicas differ in the history since the last call" in str(report)


def test_differences_beyond_ten_are_counted() -> None:
    lines = str(_report(*(_difference(f"parameter 'p{index:02d}'") for index in range(13)))).splitlines()

    assert sum("against" in line and "parameter 'p" in line for line in lines) == 10
    assert lines[-1] == "  ... 3 more"
    assert "13 of 20 parameters" in lines[0]


def test_ten_differences_are_all_listed() -> None:
    assert "more" not in str(_report(*(_difference(f"parameter 'p{index:02d}'") for index in range(10))))


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
    assert _difference(name, kind).parameter == parameter


def test_a_name_is_never_broken() -> None:
    name = f"parameter '{'x' * 100}'"

    assert f"'{'x' * 100}'," in str(_difference(name))


def test_the_minority_is_suspected_and_named_first() -> None:
    assert _difference().suspects == (1,)
    assert "rank 1 against ranks 0, 2" in str(_difference())


@pytest.mark.parametrize(
    "generators, words",
    [
        (((0, 1, 2),), "random generators are equal on ranks 0-2"),
        (((0, 2), (1,)), "random generators are equal on ranks 0, 2"),
        (((0, 2), (1, 3)), "random generators are equal on ranks 0, 2 and on ranks 1, 3"),
        (((0,), (1,)), "random generators differ on all ranks"),
    ],
)
def test_groups_of_generators_that_stand_alike_end_the_line(
    generators: tuple[tuple[int, ...], ...], words: str
) -> None:
    report = ReplicaReport("check_replicas() call 1", 4, COMPARED, generators=generators)

    assert " ".join(str(report).split()).endswith(f"note: {words}; they need not agree")


def test_one_rank_says_nothing_of_generators() -> None:
    assert "generators" not in str(ReplicaReport("check_replicas() call 1", 1, COMPARED, generators=((0,),)))
