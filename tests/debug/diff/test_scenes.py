"""Text and JSON of `legacy-ddp diff` for a set of scenes, byte for byte.

A change of a message by intention: `python -m tests.debug.diff.test_scenes` writes scenes.txt again; read its diff.
"""

import json
import math
from collections.abc import Callable, Sequence
from contextlib import chdir
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.helpers.command import command
from tests.helpers.operations import Operation, model, operation, recordable, rewritten
from tests.helpers.scenes import Scene, rewrite, texts_in
from tests.helpers.traces import NAMES, START, call_facts, end_after, environment, without, write_trace

EXPECTED = Path(__file__).with_name("scenes.txt")
WORD, OTHER = "ab" * 8, "cd" * 8
FIRST = {phase: names[0] for phase, names in NAMES.items()}
Given = dict[str, Any]
STEP = model()
WRONG = rewritten(STEP, 7, "h2(x)", "wrong")
CLONE = operation("clone", ["h0(x)"], ["h0(x)"], module="0.act")
BLOCK = [operation("mul", [f"e{index}"], [f"e{index + 1}"]) for index in range(50)]
RELU, TANH = (operation(name, ["x"], [name], module=name) for name in ("relu", "tanh"))


def planted(*wheres: tuple[int, int, str], value: tuple[Any, ...] = (WORD, 3.5)) -> Given:
    """Another entry in the first name of each phase. ``wheres``: rank, step and phase."""
    return {"planted": {(rank, step, phase, FIRST[phase]): value for rank, step, phase in wheres}}


def facts(**changes: str) -> Given:
    """Other facts in the environment of every rank."""

    def changed(rank: int, world_size: int) -> Any:
        plain = environment(rank, world_size)
        return environment(rank, world_size, facts={**plain.facts, **changes})

    return {"environments": changed}


def calls(**changes: Any) -> Given:
    """Other facts about the call of step 3 on rank 1."""
    return {"calls": lambda step, rank: call_facts(step, rank, **(changes if (step, rank) == (3, 1) else {}))}


def steps(first_step: int, **changes: Any) -> Given:
    return {"environments": lambda rank, size: environment(rank, size, first_step=first_step, **changes)}


def with_operations(other: Sequence[Operation] | None = None) -> Given:
    """Operations of step 3, and ``other`` operations on rank 1."""
    return {"operations": lambda step, rank: recordable(other if other and rank == 1 else STEP) if step == 3 else ()}


def with_metrics(*of_steps: dict[str, float]) -> Given:
    return {"calls": lambda step, rank: call_facts(step, rank, metrics=of_steps[step - 1])}


def share(micro_batches: int, data: str) -> Callable[[int, int], Any]:
    """Calls of a rank that has so many of four micro-batches, each with data of its own."""

    def call(step: int, rank: int) -> Any:
        numbers = range(rank * micro_batches, (rank + 1) * micro_batches)
        inputs = tuple(("int64 (4,)", data if (step, number) == (3, 2) else f"{step}-{number}") for number in numbers)
        return call_facts(
            step, rank, micro_batches=micro_batches, sample_size=micro_batches, forwards=micro_batches, inputs=inputs
        )

    return call


def own(rank: int, size: int) -> Any:
    """An environment with facts of its run, and of its rank alone."""
    return environment(rank, size, facts={"torch": f"2.{size}", "seed": str(rank)})


EQUAL = {"loss": 0.1, "nan": math.nan, "inf": math.inf}
LATER = ("local_gradients", "reduced_gradients", "settings", "optimizer", "parameters", "buffers")
GRADIENTS = {**NAMES, "optimizer": (), "settings": ()}
OTHER_INPUTS = (("int64 (16, 64)", WORD), ("int64 (16, 64)", f"{16 * 3 + 9:016x}"))
SMALL = (WORD, 1.375 * (1 + 1e-7))
HALF = {"calls": lambda step, rank: call_facts(step, rank, micro_batches=1, sample_size=32)}
REPRODUCIBLE = facts(reproducible="True")
SUMS = planted(*[(rank, 3, "reduced_gradients") for rank in range(4)])
WEIGHTS = {**NAMES, "parameters": tuple(f"parameter '{letter}'" for letter in "abcdefg")}
FIVE = {"planted": {(0, 3, "parameters", f"parameter '{letter}'"): (WORD, 2.0) for letter in "bcdef"}}
SECOND = "optimizer 1: exp_avg of 'a.b'"
TWO_OPTIMIZERS = {**NAMES, "optimizer": ("optimizer 0: exp_avg of 'a'", SECOND)}
OF_THE_SECOND = {"planted": {(1, 3, "optimizer", SECOND): (WORD, 2.0)}}
WITH_STATE = (*START, "optimizer")
FOREACH = {**NAMES, "settings": ("foreach of parameter group 0", *NAMES["settings"])}
ONE_BY_ONE = {(1, step, "settings", FOREACH["settings"][0]): ("True", None) for step in range(1, 6)}
RATE = {(1, 3, "settings", NAMES["settings"][0]): ("0.5", None)}
LATE = {"reduced_gradients": NAMES["reduced_gradients"]}
METRICS = {f"m{number}": number / 4 for number in range(12)}
VALUE = (WORD, 1.0)
AROUND = {(1, step, "parameters", FIRST["parameters"]): VALUE for step in (1, 2, 4, 5)}
TURNED = {**NAMES, "parameters": NAMES["parameters"][::-1], "settings": NAMES["settings"][::-1]}
LETTERS: Given = {
    "planted": {
        (rank, step, "parameters", f"parameter '{letter}'"): (letter * 16, 1.0)
        for rank in range(3)
        for step in range(6)
        for letter in "ab"
    }
}
LORA = {**NAMES, "parameters": (*NAMES["parameters"], "parameter 'lora'")}
ABSENT = {(rank, step, "parameters", "parameter 'lora'"): (None, None) for rank in (0, 1) for step in (0, 1, 2)}
COMPILED = {**NAMES, "parameters": ("parameter '_orig_mod.a'", "parameter '_orig_mod.b'")}
INPUTS = call_facts(3, 1).inputs
OTHER_INPUT = ("int64 (16, 64)", WORD)
LOCAL = {"environments": lambda rank, size: environment(rank, size, local_buffers=("me*",))}

# Name: the run, and a second run; {} for a run as it is.
TWO_RUNS: dict[str, tuple[Given, Given]] = {
    "equal": ({}, {}),
    **{f"{phase} at the start": ({}, planted((1, 0, phase))) for phase in START},
    **{f"{phase} at step 3": ({}, planted((1, 3, phase))) for phase in LATER},
    "missing in B": ({}, planted((0, 2, "optimizer"), value=(None, None))),
    "not finite": ({}, planted((0, 2, "parameters"), value=(WORD, 1.0, 7))),
    "rounding that stays": ({}, planted((0, 3, "parameters"), value=SMALL)),
    "rounding that grows": (
        {},
        {
            "planted": {
                **planted((0, 3, "parameters"), value=SMALL)["planted"],
                **planted((0, 5, "parameters"))["planted"],
            }
        },
    ),
    "several places": (
        {"world_size": 3},
        {"world_size": 3, **planted((0, 4, "buffers"), (1, 2, "parameters"), (2, 2, "optimizer"))},
    ),
    "a schedule, then tensors": ({}, planted((0, 2, "settings"), (0, 3, "parameters"))),
    "data": ({}, {**planted((1, 3, "local_gradients")), **calls(inputs=OTHER_INPUTS)}),
    "shape and generators": (
        {},
        {**planted((1, 3, "local_gradients")), **calls(inputs=(("int64 (8, 64)", WORD),), generators=WORD)},
    ),
    "micro-batches": ({}, {**planted((1, 3, "local_gradients")), **calls(micro_batches=3, forwards=3)}),
    "sample_size": ({}, {**planted((1, 3, "reduced_gradients")), **calls(sample_size=32)}),
    "inputs not known": (
        calls(inputs_complete=False),
        {**planted((1, 3, "local_gradients")), **calls(inputs_complete=False)},
    ),
    "seed and threads": (facts(), {**planted((0, 0, "parameters")), **facts(seed="1", threads="8")}),
    "threads changed no bit": (facts(), facts(threads="8")),
    "gradients alone": ({"names": GRADIENTS}, {"names": GRADIENTS, **planted((0, 3, "parameters"))}),
    "no buffers in B": ({}, {"names": {**NAMES, "buffers": ()}}),
    "no common step": ({}, steps(20)),
    "a resumed run": ({"steps": 8}, {"steps": 5, **steps(4), **planted((0, 3, "parameters"))}),
    "only the start": ({}, {"steps": 0}),
    "a shorter run": ({}, {"steps": 3}),
    "other intervals": ({}, steps(1, every=2)),
    "settings and tensors in one step": ({}, planted((0, 3, "settings"), (0, 3, "parameters"))),
    "settings and weights at the start": ({}, planted((0, 0, "settings"), (0, 0, "parameters"))),
    "settings behind one apart": (
        {"names": FOREACH},
        {"names": FOREACH, "planted": {**ONE_BY_ONE, **RATE, **planted((1, 3, "parameters"))["planted"]}},
    ),
    "metrics": ({}, calls(metrics={"loss": 1.5})),
    "equal metrics": (with_metrics(*[EQUAL] * 5), with_metrics(*[EQUAL] * 5)),
    "metrics with other bits": (
        with_metrics(*[{"loss": 1.0, "k": 3.0}] * 5),
        with_metrics(
            *[{"loss": 1.0, "k": 3.0}] * 2,
            {"loss": math.nextafter(1.0, 2.0), "k": 3.0},
            {"loss": 1.0, "k": 3.0},
            {"loss": 2.0, "k": 4.0},
        ),
    ),
    **{
        f"a metric: {a} and {b}": (with_metrics(*[a] * 5), with_metrics(*[b] * 5))
        for a, b in (
            ({"m": math.nan}, {"m": 1.0}),
            ({"m": -math.inf}, {"m": math.inf}),
            ({"m": 0.0}, {"m": -0.0}),
            ({}, {"m": 1.0}),
            ({"m": 1.0}, {}),
        )
    },
    "metrics, other world sizes": (
        {"world_size": 1, **with_metrics(*[{"loss": 1.0}] * 5)},
        {"world_size": 3, **with_metrics(*[{"loss": 2.0}] * 5)},
    ),
    "operations": (with_operations(), {**planted((1, 3, "local_gradients")), **with_operations(WRONG)}),
    "equal operations": (
        with_operations(),
        {**planted((1, 3, "local_gradients")), **with_operations()},
    ),
    "an operation of B alone": (
        with_operations(),
        with_operations([*STEP[:3], operation("mul", ["r0(x)"], ["e"]), *rewritten(STEP[3:], 1, "r0(x)", "e")]),
    ),
    "many operations of B alone": (with_operations(), with_operations([*STEP[:3], *BLOCK, *STEP[3:]])),
    "operations without influence before": (with_operations(), with_operations([*WRONG[:2], CLONE, *WRONG[2:]])),
    "operations in another order": (
        with_operations([RELU, TANH, *STEP]),
        with_operations([TANH, RELU, *STEP]),
    ),
    "operations without a difference of tensors": (with_operations(), with_operations(WRONG)),
    "nothing before": ({"names": LATE}, {"names": LATE, **planted((0, 1, "reduced_gradients"))}),
    "state at the start": (
        {"start": WITH_STATE, **planted((0, 0, "optimizer"))},
        {"start": WITH_STATE, **planted((0, 0, "optimizer"), value=(OTHER, 1.0))},
    ),
    "weights at a later start": (
        {"names": GRADIENTS, "steps": 8},
        {"names": GRADIENTS, "steps": 5, **steps(4), **planted((0, 3, "parameters"))},
    ),
    "two optimizers": ({"names": TWO_OPTIMIZERS}, {"names": TWO_OPTIMIZERS, **OF_THE_SECOND}),
    "equal norms": ({}, planted((0, 3, "parameters"), value=(WORD, 1.375))),
    "several names": ({"names": WEIGHTS}, {"names": WEIGHTS, **FIVE}),
    "many places": ({"steps": 40}, {"steps": 40, **planted(*[(0, step, "buffers") for step in range(1, 40, 2)])}),
    "many metrics": (
        {"calls": lambda step, rank: call_facts(step, rank, metrics=METRICS)},
        {"calls": lambda step, rank: call_facts(step, rank, metrics=dict.fromkeys(METRICS, float(step)))},
    ),
    "world sizes": ({}, {"world_size": 4}),
    "world sizes, equal amounts": ({}, {"world_size": 4, **HALF, **SUMS}),
    "world sizes, equal amounts, reproducible": (REPRODUCIBLE, {"world_size": 4, **HALF, **REPRODUCIBLE, **SUMS}),
    "world sizes, different": (
        {},
        {"world_size": 4, **planted(*[(rank, 3, "reduced_gradients") for rank in range(4)])},
    ),
    "world sizes, reproducible": (
        facts(reproducible="True"),
        {
            "world_size": 4,
            **facts(reproducible="True"),
            **planted(*[(rank, 3, "reduced_gradients") for rank in range(4)]),
        },
    ),
    "world sizes, ranks of B differ": ({}, {"world_size": 4, **planted((2, 3, "parameters"))}),
    # Places: joined, parted, ordered.
    "a place of many steps": (
        {"steps": 12},
        {
            "steps": 12,
            **planted(*[(1, step, "parameters") for step in range(4, 13)], (0, 9, "buffers"), (1, 9, "buffers")),
        },
    ),
    **{
        f"a place parted by {how}": ({}, {"planted": {**AROUND, **other}})
        for how, other in {
            "another name": {(1, 3, "parameters", "parameter 'b'"): VALUE},
            "one name more": {(1, 3, "parameters", f"parameter '{letter}'"): VALUE for letter in "ab"},
            "one rank more": {(rank, 3, "parameters", FIRST["parameters"]): VALUE for rank in (0, 1)},
            "an equal step": {},
        }.items()
    },
    "ranks that differ in names of their own": (
        {},
        {
            "planted": {
                **dict.fromkeys([(0, step, "parameters", "parameter 'a'") for step in (1, 2)], VALUE),
                **dict.fromkeys([(1, 1, "parameters", "parameter 'b'"), (1, 2, "parameters", "parameter 'a'")], VALUE),
            }
        },
    ),
    "names in another order": (LETTERS, {**LETTERS, "names": TURNED}),
    "names in another order and a difference": (
        LETTERS,
        {
            "names": TURNED,
            "planted": {**LETTERS["planted"], **planted((0, 3, "settings"), (0, 3, "buffers"))["planted"]},
        },
    ),
    "a gradient and settings in one step": ({}, planted((0, 2, "settings"), (0, 2, "local_gradients"))),
    "a parameter added later": (
        {"names": LORA, "planted": ABSENT},
        {"names": LORA, "planted": {**ABSENT, (0, 3, "parameters", "parameter 'lora'"): (None, None)}},
    ),
    # Size of a difference.
    "rounding that grows within a step": (
        {},
        {
            "planted": {
                **planted((0, 2, "local_gradients"), value=SMALL)["planted"],
                **planted((0, 2, "parameters"))["planted"],
            }
        },
    ),
    "nothing but rounding beside gradients": (
        planted((0, 2, "local_gradients"), value=("c" * 16, 1e-9)),
        planted((0, 2, "local_gradients"), value=("d" * 16, 1.02e-9)),
    ),
    # Causes.
    "facts, likeliest first": (
        facts(),
        {
            **planted((0, 1, "parameters")),
            **facts(torch="2.14.0", threads="4", host="elsewhere", pid="9", python="3.12"),
        },
    ),
    "facts of some ranks": (
        {"world_size": 3},
        {
            "world_size": 3,
            **planted((0, 1, "parameters")),
            "environments": lambda rank, size: environment(
                rank, size, facts={"torch": "2.13.0", "threads": str(1 + rank), "seed": "0"}
            ),
        },
    ),
    **{
        f"another call: {what}": ({}, {**planted((1, 3, "local_gradients")), **calls(**changes)})
        for what, changes in {
            "data of the second pass": {"inputs": (INPUTS[0], OTHER_INPUT)},
            "shape of the first pass": {"inputs": (("int64 (8, 64)", WORD), INPUTS[1])},
            "no sample_size": {"sample_size": None},
            "took no part": {"took_part": False, "micro_batches": 0, "forwards": 0, "inputs": ()},
            "generators": {"generators": WORD},
            "a further pass": {"forwards": 3, "inputs": (*INPUTS, OTHER_INPUT)},
            "a further pass after other data": {"forwards": 3, "inputs": (INPUTS[0], OTHER_INPUT, OTHER_INPUT)},
            "a plain module": {"micro_batches": 0, "forwards": 0, "inputs": ()},
            "timings": {"seconds_waited": 9.0, "local_norm": 7.0, "call": 99, "seconds": {}, "payload_bytes": 3},
        }.items()
    },
    "another call: a later one": (
        {},
        {**planted((0, 2, "local_gradients")), **calls(generators=WORD)},
    ),
    "another call: earlier on another rank": (
        {"world_size": 3},
        {
            "world_size": 3,
            **planted((0, 4, "local_gradients")),
            "calls": lambda step, rank: call_facts(step, rank, micro_batches=9 if step >= 3 - rank else 2),
        },
    ),
    # Phases and steps that were not recorded.
    **{
        f"an optimizer without {lacking[-1]}": (given, given)
        for lacking in (("settings",), ("settings", "optimizer"))
        for given in [{"names": {**NAMES, **dict.fromkeys(lacking, ())}, **facts(optimizer="LBFGS")}]
    },
    "settings and optimizer in A alone": ({}, {"names": GRADIENTS | {"local_gradients": NAMES["local_gradients"]}}),
    "a difference beyond the common steps": ({}, {"steps": 9, **planted((0, 7, "parameters"))}),
    "a resumed run with optimizer state": ({}, {"steps": 2, **steps(4)}),
    # Refused.
    "another model": (
        {},
        {"names": {**NAMES, "parameters": ("parameter 'a'", *(f"parameter 'c{i}'" for i in range(5)))}},
    ),
    "another shape": ({}, {"kind": "float32 (9,)"}),
    "another model by its environment": (
        {"names": {"local_gradients": NAMES["local_gradients"]}},
        {
            "names": {"local_gradients": NAMES["local_gradients"]},
            "environments": lambda rank, size: environment(rank, size, parameters=("a", "z")),
        },
    ),
    "a compiled model": ({"names": COMPILED}, {}),
    "a compiled model of another shape": ({"names": COMPILED, "kind": "float32 (9,)"}, {}),
    # World sizes.
    "world sizes, local buffers": (
        {},
        {
            "world_size": 4,
            **planted((0, 1, "local_gradients"), (0, 3, "buffers")),
            "environments": lambda rank, size: environment(rank, size, local_buffers=("me*",)),
        },
    ),
    **{
        f"world sizes, reproducible, {name}": (
            {**REPRODUCIBLE, "calls": share(2, "3-2")},
            {
                **REPRODUCIBLE,
                "calls": share(1, data),
                "world_size": 4,
                **planted((0, 3, "reduced_gradients"), value=SMALL),
            },
        )
        for name, data in {"equal data": "3-2", "other data": "other"}.items()
    },
    "world sizes, reproducible, another shape": (
        {**REPRODUCIBLE, "calls": share(2, "3-2")},
        {
            **REPRODUCIBLE,
            **planted((0, 1, "reduced_gradients")),
            "world_size": 1,
            "calls": lambda step, rank: call_facts(
                step, rank, inputs=(("int64 (8,)", "a"),), forwards=1, micro_batches=1
            ),
        },
    ),
    "world sizes, facts of single ranks": (
        {"environments": own},
        {"environments": own, "world_size": 3, **planted((0, 3, "parameters"))},
    ),
    "world sizes, ranks of A differ": (planted((1, 2, "parameters")), {"world_size": 4}),
    "buffers of each rank": (
        LOCAL,
        {**LOCAL, **planted((1, 3, "buffers"))},
    ),
}
ONE_RUN: dict[str, Given] = {
    "equal": {"world_size": 3},
    "one rank": {"world_size": 1},
    **{f"{phase} at the start": {"world_size": 3, **planted((1, 0, phase))} for phase in START},
    **{f"{phase} at step 3": {"world_size": 3, **planted((1, 3, phase))} for phase in LATER},
    "rank 0 against the others": {"world_size": 3, **planted((0, 3, "parameters"))},
    "no majority": planted((1, 2, "parameters"), (1, 3, "parameters"), (0, 5, "buffers")),
    "each its own": {
        "world_size": 4,
        "planted": {(rank, 3, "buffers", "buffer 'mean'"): (f"{rank:016x}", 1.0) for rank in range(4)},
    },
    "missing on a rank": {"world_size": 3, **planted((2, 3, "optimizer"), value=(None, None))},
    "many groups": {
        "world_size": 9,
        "planted": {(rank, 3, "buffers", "buffer 'mean'"): (f"{rank:016x}", 1.0) for rank in range(9)},
    },
    "state at the start": {"world_size": 3, "start": WITH_STATE, **planted((1, 0, "optimizer"))},
    "two names": {
        "world_size": 3,
        "planted": {(1, 2, "parameters", name): (WORD, 2.0) for name in NAMES["parameters"]},
    },
    "not finite": {"world_size": 3, **planted((1, 2, "parameters"), value=(WORD, 1.0, 3))},
    "settings behind one apart": {"world_size": 3, "names": FOREACH, "planted": {**ONE_BY_ONE, **RATE}},
    "facts": {
        "world_size": 3,
        "environments": lambda rank, size: environment(
            rank, size, facts={"threads": str(rank // 2), "seed": str(rank)}
        ),
    },
    "ended by an error": {"end": "ReplicaDivergenceError"},
    "only the start": {"steps": 0},
    "each its own, and another name": {
        "world_size": 4,
        "planted": {
            **{(rank, 3, "parameters", "parameter 'a'"): (f"{rank:016x}", 1.0) for rank in (1, 2)},
            (3, 3, "parameters", "parameter 'b'"): VALUE,
        },
    },
    "places of many steps": {
        "world_size": 3,
        "steps": 12,
        **planted(*[(1, step, "parameters") for step in (*range(3, 8), *range(9, 13))], (2, 11, "optimizer")),
    },
    "many places": {"steps": 26, "world_size": 3, **planted(*[(1, step, "buffers") for step in range(1, 26, 2)])},
    "buffers of each rank": {"world_size": 3, **LOCAL, **planted((1, 2, "buffers"))},
    "facts, and seeds of each rank": {
        "world_size": 3,
        **planted((1, 2, "parameters")),
        "environments": lambda rank, size: environment(
            rank, size, facts={"torch": f"2.{13 + (rank == 1)}.0", "seed": str(rank), "pid": str(rank)}
        ),
    },
    "operations": with_operations(WRONG),
}
# Name: the run, and what happens to its files.
DAMAGED: dict[str, Callable[[Path], object]] = {
    "a rank ends early": lambda folder: end_after(folder / "rank-00001.jsonl", 2),
    "a rank recorded no step": lambda folder: end_after(folder / "rank-00001.jsonl", None),
    "no optimizer on rank 1": lambda folder: without(folder / "rank-00001.jsonl", lambda line: b'"optimizer"' in line),
    "a damaged line": lambda folder: _damage(folder / "rank-00001.jsonl"),
    "a damaged second line": lambda folder: _damage(folder / "rank-00001.jsonl", 1),
    "a rank is a step behind": lambda folder: end_after(folder / "rank-00001.jsonl", 4),
    "a rank has the start alone": lambda folder: end_after(folder / "rank-00002.jsonl", 0),
    "a torn last line": lambda folder: _cut_bytes(folder / "rank-00001.jsonl", 30),
    "a rank was killed within its step": lambda folder: without(
        folder / "rank-00001.jsonl",
        lambda line: b'"line":"end"' in line or (b'"step":5' in line and b'"phase":"buffers"' in line),
    ),
    "names in another order on a rank": lambda folder: _turned(folder, 1),
    "a phase is missing in the midst": lambda folder: without(
        folder / "rank-00000.jsonl", lambda line: b'"step":3,"phase":"parameters"' in line
    ),
    "a call is missing": lambda folder: without(
        folder / "rank-00001.jsonl", lambda line: line.startswith(b'{"line":"call","step":3,')
    ),
}


def _damage(path: Path, at: int = 20) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:at], lines[at].replace(b":", b";", 1), *lines[at + 1 :]]))


def _turned(folder: Path, rank: int) -> None:
    """The file of a run with its names in another order, and another value in step 4."""
    given = {"world_size": 3, "names": TURNED, **planted((rank, 4, "parameters"))}
    with TemporaryDirectory() as other:
        name = f"rank-{rank:05}.jsonl"
        (folder / name).write_bytes((write_trace(Path(other), **given) / name).read_bytes())


def _cut_bytes(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def outputs(*folders: Path) -> str:
    """Exit status, text and JSON of the command, with the names of the folders alone."""
    names = [folder.name for folder in folders]
    with chdir(folders[0].parent):
        text, members = command("diff", *names), command("diff", "--json", *names)
    answer = json.dumps(json.loads(members.stdout)) if members.stdout else members.stderr.rstrip()
    return f"exit status {text.returncode}\n{text.stdout}{answer}\n"


def scenes() -> dict[str, Scene]:
    """All scenes by name; each writes its traces below a folder."""
    pairs = {f"two runs: {name}": partial(_compared, given={"a": a, "b": b}) for name, (a, b) in TWO_RUNS.items()}
    single = {f"one run: {name}": partial(_compared, given={"run": given}) for name, given in ONE_RUN.items()}
    harmed = {f"one run: {name}": partial(_harmed, harm) for name, harm in DAMAGED.items()}
    beside = {f"two runs: {name}": partial(_harmed, harm, beside=True) for name, harm in DAMAGED.items()}
    return {**pairs, **single, **harmed, **beside}


def _compared(path: Path, given: dict[str, Given]) -> str:
    return outputs(*[write_trace(path / name, **of_run) for name, of_run in given.items()])


def _harmed(harm: Callable[[Path], object], path: Path, *, beside: bool = False) -> str:
    """A run with a file that was harmed, alone or beside a whole one."""
    folders = [write_trace(path / name, world_size=3) for name in ("a", "b")]
    harm(folders[1])
    return outputs(*folders) if beside else outputs(folders[1])


@pytest.mark.parametrize("name", scenes())
def test_the_command_answers_as_before(tmp_path: Path, name: str) -> None:
    assert scenes()[name](tmp_path) == texts_in(EXPECTED)[name]


def test_every_scene_is_tested() -> None:
    assert [*texts_in(EXPECTED)] == [*scenes()]


if __name__ == "__main__":
    rewrite(EXPECTED, scenes())
