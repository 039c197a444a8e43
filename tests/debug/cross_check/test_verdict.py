"""The verdict of a cross-check: ranks counted by hand, the cause with its evidence, settings that differ, advice."""

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

import legacy_ddp
from legacy_ddp import LegacyDistributedDataParallel, debug
from legacy_ddp._text import compare_rows
from legacy_ddp.debug import cross_check
from legacy_ddp.debug._cross_check.trial import difference_from
from legacy_ddp.debug._cross_check.verdict import (
    ON_ITS_RANK,
    ON_NEXT_RANK,
    REPEAT,
    CrossCheckReport,
    Digests,
    Place,
    Verdict,
    Witness,
    choose_batch,
    differing_batches,
    judge,
    report_of,
)
from legacy_ddp.debug._operations.align import first_difference
from legacy_ddp.debug._operations.operation import Operation
from legacy_ddp.debug._trace.environment import RankSettings, describe_settings, differing_settings
from tests.helpers.operations import changed, model, operation, rewritten, value

A, B, C = (1, 1), (1, 2), (1, 3)


def _judge(batch: int, own: Digests, following: Digests, repeats: Sequence[tuple[Digests, Digests]]) -> Verdict:
    """The verdict about the batch of rank ``batch``, with these results on its rank and on the next rank."""
    next_rank = (batch + 1) % len(repeats)
    return judge({Witness(batch, ON_ITS_RANK): own, Witness(next_rank, ON_NEXT_RANK): following}, repeats)


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_a_wrong_rank_disagrees_about_its_batch_and_the_batch_before(size: int) -> None:
    for wrong in range(size):
        on_its_rank = [(rank, rank == wrong) for rank in range(size)]
        on_next_rank = [(rank, (rank + 1) % size == wrong) for rank in range(size)]
        batches = differing_batches(on_its_rank, on_next_rank)

        assert batches == sorted({wrong, (wrong - 1) % size})
        assert choose_batch(batches, size) == (wrong if size > 2 else 0)


@pytest.mark.parametrize(
    "batch, own, following, repeats, expected",
    [
        (0, A, A, "aab", ("differs", (2,), (2, REPEAT), (0, REPEAT))),
        # Without a majority all ranks are shown.
        (0, A, B, "ab", ("differs", (0, 1), (1, REPEAT), (0, REPEAT))),
        (0, A, B, "abab", ("differs", (0, 1, 2, 3), (1, REPEAT), (0, REPEAT))),
        (0, A, B, "abc", ("differs", (0, 1, 2), (1, REPEAT), (0, REPEAT))),
        # A result that does not return is that of the rank that differs from all repetitions.
        (1, B, A, "aaa", ("once", (1,), (1, ON_ITS_RANK), (1, REPEAT))),
        (1, A, B, "aaa", ("once", (2,), (2, ON_NEXT_RANK), (2, REPEAT))),
        (1, B, C, "aaa", ("once", (1, 2), (1, ON_ITS_RANK), (1, REPEAT))),
        (0, B, A, "aa", ("once", (0,), (0, ON_ITS_RANK), (0, REPEAT))),
        (1, A, B, "aa", ("once", (0,), (0, ON_NEXT_RANK), (0, REPEAT))),
        (0, B, A, "a", ("once", (0,), (0, ON_ITS_RANK), (0, REPEAT))),
        (0, A, B, "a", ("once", (0,), (0, ON_NEXT_RANK), (0, REPEAT))),
        (0, B, C, "a", ("once", (0,), (0, ON_ITS_RANK), (0, REPEAT))),
    ],
)
def test_ranks_are_counted(
    batch: int, own: Digests, following: Digests, repeats: str, expected: tuple[str, tuple[int, ...], Any, Any]
) -> None:
    """``repeats``: the result of both repetitions on each rank. ``expected``: kind, ranks, odd, reference."""
    kind, ranks, odd, reference = expected
    verdict = _judge(batch, own, following, [({"a": A, "b": B, "c": C}[result],) * 2 for result in repeats])

    assert (verdict.kind, verdict.ranks) == (kind, ranks)
    assert (verdict.odd, verdict.reference) == (Witness(*odd), Witness(*reference))
    assert verdict.is_attributed == (kind == "once" or len(ranks) < len(repeats))


STEP = model()
UNSTABLE = [(A, B), (A, A)]
VERDICTS: dict[str, Any] = {
    "nondeterministic": _judge(0, A, A, UNSTABLE),
    "once": _judge(0, B, A, [(A, A)] * 2),
    "differs": _judge(0, A, B, [(A, A), (B, B)]),
}


def _report(
    kind: str, other: list[Operation], first: list[Operation] = STEP, *, is_intermittent: bool = False
) -> CrossCheckReport:
    place = Place(first_difference(first, other), None, len(first), is_intermittent=is_intermittent)
    assert place.difference is not None
    return report_of("cross_check() call 1", 2, 2, 0, VERDICTS[kind], ["the loss"], place, ())


def _scaled(number: float) -> list[Operation]:
    """A step that multiplies by a number that forward has counted."""
    return [operation("mul", ["x"], [f"x * {number}"], settings=f"other={number}"), *STEP]


ENDS = [operation("relu", ["x"], ["r"], module="a"), operation("tanh", ["x"], ["t"], module="b")]
WRONG = changed(rewritten(STEP, 4, "h1(x)", "wrong"), 4, outputs=(value("wrong"),))
LONGER = [*STEP, operation("clamp", ["g"], ["g'"], stage="backward")]
COUNTERS = [
    (_scaled(0.04), _scaled(0.05)),
    (STEP, [*STEP[:2], operation("clamp", ["y"], ["z"]), *STEP[2:]]),
    ([*ENDS, *STEP], [*reversed(ENDS), *STEP]),
]


@pytest.mark.parametrize("kind", ["nondeterministic", "once"])
@pytest.mark.parametrize("first, other", COUNTERS)
def test_a_counter_in_forward_and_another_order_are_no_kernel(
    kind: str, first: list[Operation], other: list[Operation]
) -> None:
    report = _report(kind, other, first)

    assert "why: state in Python that a run changes: a counter, a cache, an attribute of a module" in report.place
    assert report.next_step == "keep such state in buffers, or take it out of run()"


@pytest.mark.parametrize(
    "kind, other, is_intermittent, why, step",
    [
        # Operations of one rank alone behind equal values are not harmless.
        ("differs", LONGER, False, "the only recorded difference, and the likely cause of the tensors that differ", ""),
        ("nondeterministic", WRONG, False, "a kernel that is not deterministic (atomic additions, threads)", ""),
        ("differs", WRONG, True, "equal outputs in a third: a kernel that is wrong at times", "start the job again"),
        ("differs", WRONG, False, "give other outputs on rank 1 than on rank 0, in every run", "compare libraries"),
    ],
)
def test_a_kernel_is_told_from_other_code_and_whether_it_is_wrong_in_every_run(
    kind: str, other: list[Operation], is_intermittent: bool, why: str, step: str
) -> None:
    report = _report(kind, other, is_intermittent=is_intermittent)

    assert why in next(text for text in report.place if text.startswith("why: "))
    assert report.next_step.startswith(step)


@pytest.mark.parametrize("kind", VERDICTS)
@pytest.mark.parametrize("kind_of_input", ["float32 (4, 8)", "float64 (4, 8)"])
def test_an_attribute_of_a_module_is_no_other_batch(kind: str, kind_of_input: str) -> None:
    other = changed(model("y"), 1, inputs=(value("y", kind_of_input), STEP[1].inputs[1]))

    text = " ".join(str(_report(kind, other)).split())

    assert "both runs had the same batch: state kept outside of parameters and buffers (an attribute of a" in text
    assert "sampler" not in text
    assert "compare the batches" not in text


def _lines(names: Sequence[str]) -> list[str]:
    rows = [{f"module {name!r}": mode for name in names} for mode in ("training", "eval", "training")]
    return list(describe_settings(compare_rows(rows).differences))


@pytest.mark.parametrize(
    "names, line",
    [
        (["", "a", "a.b", "c"], "the model and 3 modules inside"),
        (["body.0", "body.0.norm", "body.1", "body.12"], "4 modules of 'body'"),
        (["body.0", "body.0.norm", "body.0.act", "body.0.drop"], "4 modules of 'body.0'"),
        (["a", "b", "c", "d"], "4 modules, first 'a'"),
    ],
)
def test_many_modules_in_eval_are_one_line(names: list[str], line: str) -> None:
    assert _lines(names) == [f"{line}: ranks 0, 2 have training; rank 1 has eval"]


def _differing(held: Sequence[object], numbers: Sequence[dict[str, int]] | None = None) -> list[str]:
    """The differing settings of ranks that hold a value each; ranks of the third host of two by default."""
    numbers = numbers or [{"rank": rank, "global rank": rank + 4, "local rank": rank % 2} for rank in range(len(held))]
    rows = [RankSettings({"run variable 'value'": repr(value)}, own) for value, own in zip(held, numbers, strict=True)]
    return [item.name for item in differing_settings(rows)]


@pytest.mark.parametrize("held", [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 0, 1], ["0", "1", "0", "1"], ["4", "5", "6", "7"]])
def test_the_rank_s_own_number_is_no_different_setting(held: list[object]) -> None:
    assert _differing(held) == []


def test_other_values_of_each_rank_are_different_settings() -> None:
    for held in (
        [0, 1, 2, 2],  # not the own number on every rank
        [4, 1, 2, 3],  # a number of another kind on one rank
        [3, 2, 1, 0],
        [100, 101, 102, 103],  # a seed
        ["cuda:0", "cuda:1", "cuda:0", "cuda:1"],
        [0.0, 1.0, 2.0, 3.0],
        [False, True, False, True],
    ):
        assert _differing(held) == ["run variable 'value'"], held
    # A kind of number counts only if every rank has it.
    assert _differing([0, 1], [{"rank": 0, "local rank": 0}, {"rank": 3}]) == ["run variable 'value'"]


def test_a_setting_that_is_no_value_of_run_may_not_follow_the_rank() -> None:
    rows = [RankSettings({"threads": str(rank)}, {"rank": rank}) for rank in (1, 2)]

    assert [item.name for item in differing_settings(rows)] == ["threads"]


def test_few_modules_are_named() -> None:
    assert _lines(["a", "b", "c"]) == [f"module {name!r}: ranks 0, 2 have training; rank 1 has eval" for name in "abc"]


POKED = (value("poked"), *STEP[7].inputs[1:])


@pytest.mark.parametrize(
    "other",
    [
        [*STEP[:5], operation("clone", ["r0(x)"], ["copy"]), *changed(STEP, 7, inputs=POKED)[5:]],
        [*STEP[:5], operation("clone", ["r0(x)"], ["copy"]), *STEP[5:], operation("exp", ["r0(x)"], ["e"])],
    ],
    ids=["input behind a gap", "gap before a gap"],
)
def test_a_difference_arrives_with_every_record_in_it(other: list[Operation]) -> None:
    """The writers of an input once arrived as dictionaries."""
    sent = first_difference(STEP, other)
    assert sent is not None

    received = difference_from(json.loads(json.dumps(asdict(sent))))

    assert repr(received) == repr(sent)  # `==` leaves out the writers


PACKAGE = Path(legacy_ddp.__file__).parent
# Texts about operations and about replicas are in reports of a cross-check, too.
FILES = sorted(
    path
    for pattern in (
        "debug/_cross*.py",
        "debug/_cross_check/*.py",
        "debug/_operations/*.py",
        "_replicas/*.py",
        "_explain/[acer]*.py",
    )
    for path in PACKAGE.glob(pattern)
)
# The name before an open parenthesis, and all that follows in it up to the argument.
ARGUMENT = re.compile(r"(?:\b(?P<function>\w+)\((?P<before>[^()]*))?\b(?P<name>[a-z_]+)=(?!=)")
# Beside the arguments of a cross-check: the phrase that says whose argument it is.
OF_OTHERS = dict.fromkeys(("checks", "ignore", "init_sync"), LegacyDistributedDataParallel)


def _texts(path: Path) -> Iterator[str]:
    """The texts in the code, without docstrings; a part with a value is ``{}``."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    ignored = parts | {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in ignored:
            yield node.value


def _advised(text: str) -> Iterator[tuple[Callable[..., object], str]]:
    """Each argument in a text, with the function that should take it."""
    for found in ARGUMENT.finditer(text):
        name, function = found["name"], found["function"]
        if function:
            owners = (debug, legacy_ddp, LegacyDistributedDataParallel)
            yield next(getattr(owner, function) for owner in owners if hasattr(owner, function)), name
        else:
            yield OF_OTHERS.get(name, cross_check), name


def test_every_advised_argument_exists() -> None:
    advised = [(path.name, text, *item) for path in FILES for text in _texts(path) for item in _advised(text)]

    wrong = [
        (file, text) for file, text, function, name in advised if name not in inspect.signature(function).parameters
    ]
    assert wrong == []
    assert {name for *_, name in advised} >= {"max_bytes", "operations", "local_buffers", "src"}
