"""Settings of the optimizer that differ: every one is listed, and none hides another or the reason beside it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.helpers.command import command, compare
from tests.helpers.recorded import RANK_FILE
from tests.helpers.traces import NAMES, environment, without, write_trace

WORD = "ab" * 8
FOREACH, LR, LR_1, MAXIMIZE, MOMENTUM, INITIAL = (
    "foreach of parameter group 0",
    "lr of parameter group 0",
    "lr of parameter group 1",
    "maximize of parameter group 0",
    "momentum of parameter group 0",
    "initial_lr of parameter group 0",
)
SETTINGS = (FOREACH, INITIAL, LR, LR_1, MAXIMIZE, MOMENTUM)
WRITTEN: dict[str, Any] = {"names": {**NAMES, "settings": SETTINGS}, "start": ("parameters", "buffers")}
ALL, LAST = (0, 1), 5
Planted = dict[tuple[int, int, str, str], tuple[str | None, float | None]]


def setting(name: str, steps: Iterable[int], value: str | None = "9", ranks: Iterable[int] = ALL) -> Planted:
    return {(rank, step, "settings", name): (value, None) for rank in ranks for step in steps}


def tensor(step: int, phase: str = "parameters", ranks: Iterable[int] = ALL) -> Planted:
    """Another tensor from a step on."""
    return {(rank, later, phase, NAMES[phase][0]): (WORD, 1.5) for rank in ranks for later in range(step, LAST + 1)}


def until_end(first: int) -> range:
    return range(first, LAST + 1)


class Case(NamedTuple):
    """What is planted in B; then the phase and name of the first difference, causes and settings apart with places."""

    planted: Planted
    first: tuple[int, str, str]
    causes: tuple[tuple[str, str], ...] = ()
    apart: tuple[tuple[str, str], ...] = ()


WEIGHT = "parameter 'a'"
STATE = "exp_avg of 'a'"
CASES = {
    "a setting without effect before the rate": Case(
        setting(FOREACH, until_end(1), "True") | setting(LR, until_end(4)) | tensor(4),
        (4, "settings", LR),
        apart=((FOREACH, "from step 1"),),
    ),
    "a setting without effect in the step of the rate": Case(
        setting(FOREACH, until_end(4), "True") | setting(LR, until_end(4)) | tensor(4),
        (4, "settings", LR),
        apart=((FOREACH, "from step 4"),),
    ),
    "a setting without effect after the rate": Case(
        setting(FOREACH, until_end(5), "True") | setting(LR, until_end(4)) | tensor(4), (4, "settings", LR)
    ),
    "a setting without effect and a write to weights": Case(
        setting(FOREACH, until_end(3), "True") | setting(INITIAL, until_end(1)) | tensor(3),
        (3, "parameters", WEIGHT),
        apart=((INITIAL, "from step 1"), (FOREACH, "from step 3")),
    ),
    "the direction of a step is no such setting": Case(
        setting(MAXIMIZE, until_end(3), "True") | setting(FOREACH, until_end(3), "True") | tensor(3),
        (3, "settings", MAXIMIZE),
        apart=((FOREACH, "from step 3"),),
    ),
    "a setting that acts a step later": Case(
        setting(MOMENTUM, until_end(1)) | tensor(2, "optimizer"),
        (2, "settings", MOMENTUM),
        ((MOMENTUM, "from step 1"),),
    ),
    "a setting that differs and comes back": Case(
        setting(LR, (2, 3)) | tensor(5), (5, "parameters", WEIGHT), ((LR, "in steps 2-3"),)
    ),
    "a setting that comes back twice": Case(
        setting(LR, (1, 3)) | tensor(5), (5, "parameters", WEIGHT), ((LR, "in 2 of steps 1-3"),)
    ),
    "one rank alone, behind one of all ranks": Case(
        setting(FOREACH, until_end(1), "True") | setting(LR, until_end(3), ranks=(1,)) | tensor(3, ranks=(1,)),
        (3, "settings", LR),
        apart=((FOREACH, "from step 1"),),
    ),
    "one rank alone, earlier": Case(
        setting(LR, (2,), ranks=(1,)) | setting(LR_1, until_end(3)) | tensor(3),
        (3, "settings", LR_1),
        ((LR, "in step 2 on rank 1"),),
    ),
    "groups of parameters": Case(
        setting(LR, until_end(1)) | setting(LR_1, until_end(3), "8") | tensor(3),
        (3, "settings", LR_1),
        ((LR, "from step 1"),),
    ),
    "two in one step": Case(
        setting(LR, until_end(3)) | setting(MOMENTUM, until_end(3)) | tensor(3),
        (3, "settings", LR),
        ((MOMENTUM, "from step 3"),),
    ),
    "a setting that one trace alone holds": Case(
        setting(MOMENTUM, until_end(1), None) | setting(LR, until_end(3)) | tensor(3),
        (3, "settings", LR),
        (("rest of parameter group 0", "from step 1"),),
    ),
    "a setting that one trace alone holds, and a write": Case(
        setting(MOMENTUM, until_end(3), None) | tensor(3),
        (3, "parameters", WEIGHT),
        (("rest of parameter group 0", "from step 3"),),
    ),
    "a number in another form": Case(setting(MOMENTUM, until_end(1), "1e-3") | tensor(3), (3, "parameters", WEIGHT)),
    "a rate used after the gradients that differ": Case(
        setting(LR, until_end(3)) | tensor(3, "local_gradients"),
        (3, "local_gradients", "gradient of 'a'"),
        ((LR, "from step 3, after the first difference"),),
    ),
    "a setting of another rank": Case(
        setting(LR, until_end(3), ranks=(0,)) | tensor(3, ranks=(1,)),
        (3, "parameters", WEIGHT),
        ((LR, "from step 3 on rank 0"),),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=[*CASES])
def test_every_setting_that_differs_up_to_the_first_difference_is_listed(tmp_path: Path, case: Case) -> None:
    a, b = write_trace(tmp_path / "a", **WRITTEN), write_trace(tmp_path / "b", **WRITTEN, planted=case.planted)

    for found in (compare(a, b), compare(b, a)):
        assert (found.first.step, found.first.phase, found.first.name) == case.first
        assert tuple((cause.what, cause.where) for cause in found.causes) == case.causes
        assert tuple((cause.what, cause.where) for cause in found.settings_apart) == case.apart
        are_there = any(where.startswith("from") for _, where in (*case.causes, *case.apart))
        assert not are_there or "gradients, settings and optimizer state agree" not in found.meaning
    text = " ".join(command("diff", a, b).stdout.split())
    assert all(f"{what}, {where}: " in text for what, where in (*case.causes, *case.apart))
    assert text.index(case.first[2]) < 200  # in the headline


def test_another_implementation_is_the_reason_of_a_difference_of_rounding_size(tmp_path: Path) -> None:
    planted = setting(FOREACH, until_end(1), "True")
    small: Planted = {(rank, 3, "optimizer", STATE): (WORD, 1.375 * (1 + 1e-7)) for rank in ALL}
    a = write_trace(tmp_path / "a", **WRITTEN)

    for planted_too, is_reason in ((small, True), (tensor(3, "optimizer"), False)):
        found = compare(a, write_trace(tmp_path / f"b{is_reason}", **WRITTEN, planted=planted | planted_too))

        assert (found.first.step, found.first.name) == (3, STATE)
        reason = f"the likely cause is another implementation of the step: {FOREACH}."
        assert (reason in found.meaning, "the cause is something else" in found.meaning) == (is_reason, not is_reason)
        assert FOREACH in found.meaning


def test_the_ranks_of_one_run_list_every_setting_too(tmp_path: Path) -> None:
    planted = setting(FOREACH, until_end(1), "True", (1,)) | setting(LR, until_end(4), ranks=(1,))
    of_rank_1 = {"world_size": 3, **WRITTEN}

    found = compare(write_trace(tmp_path / "a", **of_rank_1, planted=planted | tensor(4, ranks=(1,))))

    assert (found.first.step, found.first.name, found.first.ranks) == (4, LR, (1,))
    assert found.causes == ()
    (apart,) = found.settings_apart
    assert (apart.what, apart.where) == (FOREACH, "from step 1")
    assert [(side[0], side[1]) for side in apart.sides] == [("ranks 0, 2", "0.001"), ("rank 1", "True")]

    found = compare(write_trace(tmp_path / "b", **of_rank_1, planted=setting(FOREACH, until_end(1), "True", (1,))))

    assert found.verdict == "same"
    assert found.notes == (
        f"{FOREACH} differs and changed no bit: 0.001 in ranks 0, 2 and True in rank 1 (from step 1)",
    )


def test_settings_that_changed_no_bit_are_all_noted(tmp_path: Path) -> None:
    planted = setting(LR, (4,)) | setting(FOREACH, (1, 2), "True", (0,))
    a, b = write_trace(tmp_path / "a", **WRITTEN), write_trace(tmp_path / "b", **WRITTEN, planted=planted)

    assert compare(a, b).notes == (
        f"{LR} differs and changed no bit: 0.001 in A and 9 in B (in step 4)",
        f"{FOREACH} differs and changed no bit: 0.001 in A and True in B (in steps 1-2 on rank 0)",
    )


def with_optimizer(rank: int, size: int) -> Any:
    return environment(rank, size, facts={"optimizer": "SGD"})


def test_a_step_that_one_rank_left_out_is_told_as_such_and_not_as_settings(tmp_path: Path) -> None:
    written = {**WRITTEN, "environments": with_optimizer, "world_size": 3}
    a = write_trace(tmp_path / "a", **written)
    b = write_trace(tmp_path / "b", **written, planted=tensor(3, "optimizer", ranks=(1,)))
    without(b / RANK_FILE.format(1), lambda line: b'"step":3,"phase":"settings"' in line)

    for folders, sides, told in (
        ((a, b), (("A", "taken"), ("B", "not taken")), "was taken in A and not taken in B."),
        ((b,), (("ranks 0, 2", "taken"), ("rank 1", "not taken")), "was not taken on rank 1."),
    ):
        found = compare(*folders)

        assert (found.first.step, found.first.name, found.first.ranks) == (3, STATE, (1,))
        assert [(cause.what, cause.sides) for cause in found.causes] == [("step of the optimizer", sides)]
        assert f"The step of the optimizer {told}" in found.meaning


def test_a_step_without_settings_has_no_settings_that_differ(tmp_path: Path) -> None:
    a, b = write_trace(tmp_path / "a", **WRITTEN), write_trace(tmp_path / "b", **WRITTEN, planted=tensor(2))
    for path in b.iterdir():
        without(path, lambda line: b'"step":4,"phase":"settings"' in line)

    assert [place.phase for place in compare(a, b).places] == ["parameters"]


def test_a_resume_on_another_number_of_ranks_lists_the_settings_of_its_first_step(tmp_path: Path) -> None:
    a = write_trace(tmp_path / "a", **WRITTEN)
    everyone = range(4)
    planted = setting(LR, (4, 5), ranks=everyone) | tensor(4, ranks=everyone)
    resumed = {"environments": lambda rank, size: environment(rank, size, first_step=4), "steps": 2}
    b = write_trace(tmp_path / "b", **WRITTEN, **resumed, world_size=4, planted=planted)

    found = compare(a, b)

    assert (found.first.step, found.first.phase) == (3, "optimizer")
    assert [(cause.what, cause.where) for cause in found.causes] == [("world size", ""), (LR, "from step 4")]
