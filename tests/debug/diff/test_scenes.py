"""Text and JSON of `legacy-ddp diff` for a set of scenes, byte for byte."""

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
from tests.helpers.traces import NAMES, START, call_facts, end_after, environment, tear, without, write_trace

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


def both(*parts: Given) -> Given:
    """All entries planted in some of these runs."""
    return {"planted": {where: value for part in parts for where, value in part["planted"].items()}}


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


EQUAL = {"loss": 0.1, "nan": math.nan, "inf": math.inf}
LATER = ("local_gradients", "reduced_gradients", "settings", "optimizer", "parameters", "buffers")
GRADIENTS = {**NAMES, "optimizer": (), "settings": ()}
SMALL = (WORD, 1.375 * (1 + 1e-7))
HALF = {"calls": lambda step, rank: call_facts(step, rank, micro_batches=1, sample_size=32)}
REPRODUCIBLE = facts(reproducible="True")
SUMS = planted(*[(rank, 3, "reduced_gradients") for rank in range(4)])
WEIGHTS = {**NAMES, "parameters": tuple(f"parameter '{letter}'" for letter in "abcdefg")}
FIVE = {"planted": {(0, 3, "parameters", f"parameter '{letter}'"): (WORD, 2.0) for letter in "bcdef"}}
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
BUFFERS = {"names": {"buffers": ("buffer 'x'", "buffer 'y'")}, "start": ("buffers",), "kind": "float32 (2,)"}
NO_X = {(rank, step, "buffers", "buffer 'x'"): (None, None) for rank in (0, 1) for step in range(6)}
OTHER_INPUT = ("int64 (16, 64)", WORD)
LOCAL: Given = {"environments": lambda rank, size: environment(rank, size, local_buffers=("me*",))}

# Name: a run beside one as it is.
OTHER_RUNS: dict[str, Given] = {
    "equal": {},
    **{f"{phase} at the start": planted((1, 0, phase)) for phase in START},
    **{f"{phase} at step 3": planted((1, 3, phase)) for phase in LATER},
    "missing in B": planted((0, 2, "optimizer"), value=(None, None)),
    "not finite": planted((0, 2, "parameters"), value=(WORD, 1.0, 7)),
    "rounding that stays": planted((0, 3, "parameters"), value=SMALL),
    "rounding that grows": both(planted((0, 3, "parameters"), value=SMALL), planted((0, 5, "parameters"))),
    "a schedule, then tensors": planted((0, 2, "settings"), (0, 3, "parameters")),
    "shape and generators": {
        **planted((1, 3, "local_gradients")),
        **calls(inputs=(("int64 (8, 64)", WORD),), generators=WORD),
    },
    "sample_size": {**planted((1, 3, "reduced_gradients")), **calls(sample_size=32)},
    "no buffers in B": {"names": {**NAMES, "buffers": ()}},
    "no common step": steps(20),
    "only the start": {"steps": 0},
    "a shorter run": {"steps": 3},
    "a difference at other intervals": {
        **steps(1, every=2),
        **planted(*[(0, step, "parameters") for step in range(1, 6)]),
    },
    "equal as far as other intervals go": steps(1, every=2),
    "world sizes, a rank ends a step early": {"world_size": 4},
    "world sizes, a rank ends early": {"world_size": 4},
    "a short rank beyond the steps of A": {"steps": 20},
    "settings and tensors in one step": planted((0, 3, "settings"), (0, 3, "parameters")),
    "settings and weights at the start": planted((0, 0, "settings"), (0, 0, "parameters")),
    "equal norms": planted((0, 3, "parameters"), value=(WORD, 1.375)),
    "world sizes": {"world_size": 4},
    "world sizes, equal amounts": {"world_size": 4, **HALF, **SUMS},
    "world sizes, different": {"world_size": 4, **SUMS},
    "seed and threads": {**planted((0, 0, "parameters")), **facts(seed="1", threads="8")},
    "threads changed no bit": facts(threads="8"),
    "facts, likeliest first": {
        **planted((0, 1, "parameters")),
        **facts(torch="2.14.0", threads="4", host="elsewhere", pid="9", python="3.12"),
    },
    "world sizes, ranks of B differ": {"world_size": 4, **planted((2, 3, "parameters"))},
    **{
        f"a place parted by {how}": {"planted": {**AROUND, **other}}
        for how, other in {
            "another name": {(1, 3, "parameters", "parameter 'b'"): VALUE},
            "one name more": {(1, 3, "parameters", f"parameter '{letter}'"): VALUE for letter in "ab"},
            "one rank more": {(rank, 3, "parameters", FIRST["parameters"]): VALUE for rank in (0, 1)},
            "an equal step": {},
        }.items()
    },
    "ranks that differ in names of their own": {
        "planted": {
            **dict.fromkeys([(0, step, "parameters", "parameter 'a'") for step in (1, 2)], VALUE),
            **dict.fromkeys([(1, 1, "parameters", "parameter 'b'"), (1, 2, "parameters", "parameter 'a'")], VALUE),
        }
    },
    "a gradient and settings in one step": planted((0, 2, "settings"), (0, 2, "local_gradients")),
    "rounding that grows within a step": both(
        planted((0, 2, "local_gradients"), value=SMALL), planted((0, 2, "parameters"))
    ),
    **{
        f"another call: {what}": {**planted((1, 3, "local_gradients")), **calls(**changes)}
        for what, changes in {
            "data of the second pass": {"inputs": (INPUTS[0], OTHER_INPUT)},
            "no sample_size": {"sample_size": None},
            "took no part": {"took_part": False, "micro_batches": 0, "forwards": 0, "inputs": ()},
            "a further pass": {"forwards": 3, "inputs": (*INPUTS, OTHER_INPUT)},
            "a further pass after other data": {"forwards": 3, "inputs": (INPUTS[0], OTHER_INPUT, OTHER_INPUT)},
            "a plain module": {"micro_batches": 0, "forwards": 0, "inputs": ()},
            "timings": {"seconds_waited": 9.0, "local_norm": 7.0, "call": 99, "seconds": {}, "payload_bytes": 3},
        }.items()
    },
    "another call: a later one": {**planted((0, 2, "local_gradients")), **calls(generators=WORD)},
    "settings and optimizer in A alone": {"names": GRADIENTS | {"local_gradients": NAMES["local_gradients"]}},
    "a difference beyond the common steps": {"steps": 9, **planted((0, 7, "parameters"))},
    "a resumed run with optimizer state": {"steps": 2, **steps(4)},
    "another model": {
        "names": {**NAMES, "parameters": ("parameter 'a'", *(f"parameter 'c{index}'" for index in range(5)))}
    },
    "another shape": {"kind": "float32 (9,)"},
    "world sizes, local buffers": {"world_size": 4, **planted((0, 1, "local_gradients"), (0, 3, "buffers")), **LOCAL},
}
# Name: a run, and what is different in another one.
TWO_RUNS: dict[str, tuple[Given, Given]] = {
    **{name: ({}, given) for name, given in OTHER_RUNS.items()},
    "several places": ({"world_size": 3}, planted((0, 4, "buffers"), (1, 2, "parameters"), (2, 2, "optimizer"))),
    "inputs not known": (
        calls(inputs_complete=False),
        {**planted((1, 3, "local_gradients")), **calls(inputs_complete=False)},
    ),
    "gradients alone": ({"names": GRADIENTS}, planted((0, 3, "parameters"))),
    "a resumed run": ({"steps": 8}, {"steps": 5, **steps(4), **planted((0, 3, "parameters"))}),
    "settings behind one apart": (
        {"names": FOREACH},
        both({"planted": {**ONE_BY_ONE, **RATE}}, planted((1, 3, "parameters"))),
    ),
    "equal metrics": (with_metrics(*[EQUAL] * 5), {}),
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
        for a, b in (({"m": math.nan}, {"m": 1.0}), ({"m": 0.0}, {"m": -0.0}), ({}, {"m": 1.0}), ({"m": 1.0}, {}))
    },
    "metrics, other world sizes": (
        {"world_size": 1, **with_metrics(*[{"loss": 1.0}] * 5)},
        {"world_size": 3, **with_metrics(*[{"loss": 2.0}] * 5)},
    ),
    "operations": (with_operations(), {**planted((1, 3, "local_gradients")), **with_operations(WRONG)}),
    "equal operations": (with_operations(), planted((1, 3, "local_gradients"))),
    "an operation of B alone": (
        with_operations(),
        with_operations([*STEP[:3], operation("mul", ["r0(x)"], ["e"]), *rewritten(STEP[3:], 1, "r0(x)", "e")]),
    ),
    "many operations of B alone": (with_operations(), with_operations([*STEP[:3], *BLOCK, *STEP[3:]])),
    "operations without influence before": (with_operations(), with_operations([*WRONG[:2], CLONE, *WRONG[2:]])),
    "operations in another order": (with_operations([RELU, TANH, *STEP]), with_operations([TANH, RELU, *STEP])),
    "operations without a difference of tensors": (with_operations(), with_operations(WRONG)),
    "nothing before": ({"names": LATE}, planted((0, 1, "reduced_gradients"))),
    "state at the start": (
        {"start": WITH_STATE, **planted((0, 0, "optimizer"))},
        planted((0, 0, "optimizer"), value=(OTHER, 1.0)),
    ),
    "weights at a later start": (
        {"names": GRADIENTS, "steps": 8},
        {"steps": 5, **steps(4), **planted((0, 3, "parameters"))},
    ),
    "several names": ({"names": WEIGHTS}, FIVE),
    "many places": ({"steps": 40}, planted(*[(0, step, "buffers") for step in range(1, 40, 2)])),
    "many metrics": (
        {"calls": lambda step, rank: call_facts(step, rank, metrics=METRICS)},
        {"calls": lambda step, rank: call_facts(step, rank, metrics=dict.fromkeys(METRICS, float(step)))},
    ),
    "world sizes, equal amounts, reproducible": (REPRODUCIBLE, {"world_size": 4, **HALF, **SUMS}),
    "world sizes, reproducible": (REPRODUCIBLE, {"world_size": 4, **SUMS}),
    "a place of many steps": (
        {"steps": 12},
        planted(*[(1, step, "parameters") for step in range(4, 13)], (0, 9, "buffers"), (1, 9, "buffers")),
    ),
    "names in another order": (LETTERS, {"names": TURNED}),
    "names in another order and a difference": (
        LETTERS,
        {"names": TURNED, **both(LETTERS, planted((0, 3, "settings"), (0, 3, "buffers")))},
    ),
    "a parameter added later": (
        {"names": LORA, "planted": ABSENT},
        {"planted": {**ABSENT, (0, 3, "parameters", "parameter 'lora'"): (None, None)}},
    ),
    "nothing but rounding beside gradients": (
        planted((0, 2, "local_gradients"), value=("c" * 16, 1e-9)),
        planted((0, 2, "local_gradients"), value=("d" * 16, 1.02e-9)),
    ),
    "facts of some ranks": (
        {"world_size": 3},
        {
            **planted((0, 1, "parameters")),
            "environments": lambda rank, size: environment(
                rank, size, facts={"torch": "2.13.0", "threads": str(1 + rank), "seed": "0"}
            ),
        },
    ),
    "another call: earlier on another rank": (
        {"world_size": 3},
        {
            **planted((0, 4, "local_gradients")),
            "calls": lambda step, rank: call_facts(step, rank, micro_batches=9 if step >= 3 - rank else 2),
        },
    ),
    **{
        f"an optimizer without {lacking[-1]}": (
            {"names": {**NAMES, **dict.fromkeys(lacking, ())}, **facts(optimizer="LBFGS")},
            {},
        )
        for lacking in (("settings",), ("settings", "optimizer"))
    },
    "another model by its environment": (
        {"names": {"local_gradients": NAMES["local_gradients"]}},
        {"environments": lambda rank, size: environment(rank, size, parameters=("a", "z"))},
    ),
    "equal digests of another kind": (BUFFERS, {"kind": "float32 (1, 2)"}),
    "nothing of another kind": ({**BUFFERS, "planted": NO_X}, {"kind": "float32 (1, 2)"}),
    "a compiled model": ({"names": COMPILED}, {"names": NAMES}),
    **{
        f"world sizes, reproducible, {name}": (
            {**REPRODUCIBLE, "calls": share(2, "3-2")},
            {"calls": share(1, data), "world_size": 4, **planted((0, 3, "reduced_gradients"), value=SMALL)},
        )
        for name, data in {"equal data": "3-2", "other data": "other"}.items()
    },
    "world sizes, reproducible, another shape": (
        {**REPRODUCIBLE, "calls": share(2, "3-2")},
        {
            **planted((0, 1, "reduced_gradients")),
            "world_size": 1,
            "calls": lambda step, rank: call_facts(
                step, rank, inputs=(("int64 (8,)", "a"),), forwards=1, micro_batches=1
            ),
        },
    ),
    "world sizes, facts of single ranks": (
        {"environments": lambda rank, size: environment(rank, size, facts={"torch": f"2.{size}", "seed": str(rank)})},
        {"world_size": 3, **planted((0, 3, "parameters"))},
    ),
    "world sizes, ranks of A differ": (planted((1, 2, "parameters")), {"world_size": 4, "planted": {}}),
    "buffers of each rank": (LOCAL, planted((1, 3, "buffers"))),
}
# Name: a run, of three ranks if nothing else is given.
ONE_RUN: dict[str, Given] = {
    "equal": {},
    "one rank": {"world_size": 1},
    **{f"{phase} at the start": planted((1, 0, phase)) for phase in START},
    **{f"{phase} at step 3": planted((1, 3, phase)) for phase in LATER},
    "rank 0 against the others": planted((0, 3, "parameters")),
    "no majority": {"world_size": 2, **planted((1, 2, "parameters"), (1, 3, "parameters"), (0, 5, "buffers"))},
    **{
        name: {
            "world_size": size,
            "planted": {(rank, 3, "buffers", "buffer 'mean'"): (f"{rank:016x}", 1.0) for rank in range(size)},
        }
        for name, size in {"each its own": 4, "many groups": 9}.items()
    },
    "missing on a rank": planted((2, 3, "optimizer"), value=(None, None)),
    "state at the start": {"start": WITH_STATE, **planted((1, 0, "optimizer"))},
    "two names": {"planted": {(1, 2, "parameters", name): (WORD, 2.0) for name in NAMES["parameters"]}},
    "not finite": planted((1, 2, "parameters"), value=(WORD, 1.0, 3)),
    "settings behind one apart": {"names": FOREACH, "planted": {**ONE_BY_ONE, **RATE}},
    "facts": {
        "environments": lambda rank, size: environment(rank, size, facts={"threads": str(rank // 2), "seed": str(rank)})
    },
    "ended by an error": {"world_size": 2, "end": "ReplicaDivergenceError"},
    "only the start": {"world_size": 2, "steps": 0},
    "each its own, and another name": {
        "world_size": 4,
        "planted": {
            **{(rank, 3, "parameters", "parameter 'a'"): (f"{rank:016x}", 1.0) for rank in (1, 2)},
            (3, 3, "parameters", "parameter 'b'"): VALUE,
        },
    },
    "places of many steps": {
        "steps": 12,
        **planted(*[(1, step, "parameters") for step in (*range(3, 8), *range(9, 13))], (2, 11, "optimizer")),
    },
    "many places": {"steps": 26, **planted(*[(1, step, "buffers") for step in range(1, 26, 2)])},
    "buffers of each rank": {**LOCAL, **planted((1, 2, "buffers"))},
    "facts, and seeds of each rank": {
        **planted((1, 2, "parameters")),
        "environments": lambda rank, size: environment(
            rank, size, facts={"torch": f"2.{13 + (rank == 1)}.0", "seed": str(rank), "pid": str(rank)}
        ),
    },
    "operations": {"world_size": 2, **with_operations(WRONG)},
}


def _without_odd_steps(folder: Path) -> None:
    odd = [f'"step":{step},'.encode() for step in (1, 3, 5)]
    for path in folder.iterdir():
        without(path, lambda line: b'"end"' not in line and any(step in line for step in odd))


# Name of two runs: what happens to the files of the second.
CHANGED: dict[str, Callable[[Path], object]] = {
    "a difference at other intervals": _without_odd_steps,
    "equal as far as other intervals go": _without_odd_steps,
    "world sizes, a rank ends a step early": lambda folder: end_after(folder / "rank-00003.jsonl", 4),
    "world sizes, a rank ends early": lambda folder: end_after(folder / "rank-00003.jsonl", 2),
    "a short rank beyond the steps of A": lambda folder: end_after(folder / "rank-00001.jsonl", 10),
}
# Name of one run: what happens to its files.
DAMAGED: dict[str, Callable[[Path], object]] = {
    "a rank ends early": lambda folder: end_after(folder / "rank-00001.jsonl", 2),
    "a rank recorded no step": lambda folder: end_after(folder / "rank-00001.jsonl", None),
    "no optimizer on rank 1": lambda folder: without(folder / "rank-00001.jsonl", lambda line: b'"optimizer"' in line),
    "a damaged line": lambda folder: _damage(folder / "rank-00001.jsonl"),
    "a damaged second line": lambda folder: _damage(folder / "rank-00001.jsonl", 1),
    "a rank is a step behind": lambda folder: end_after(folder / "rank-00001.jsonl", 4),
    "a rank has the start alone": lambda folder: end_after(folder / "rank-00002.jsonl", 0),
    "a torn last line": lambda folder: tear(folder / "rank-00001.jsonl"),
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


def outputs(*folders: Path) -> str:
    """Exit status, text and JSON of the command, with the names of the folders alone."""
    names = [folder.name for folder in folders]
    with chdir(folders[0].parent):
        text, members = command("diff", *names), command("diff", "--json", *names)
    answer = json.dumps(json.loads(members.stdout)) if members.stdout else members.stderr.rstrip()
    return f"exit status {text.returncode}\n{text.stdout}{answer}\n"


def scenes() -> dict[str, Scene]:
    """All scenes by name; each writes its traces below a folder."""
    found: dict[str, Scene] = {}
    for name, (a, b) in TWO_RUNS.items():
        found[f"two runs: {name}"] = partial(_compared, CHANGED.get(name), given={"a": a, "b": {**a, **b}})
    for name, given in ONE_RUN.items():
        found[f"one run: {name}"] = partial(_compared, None, given={"run": {"world_size": 3, **given}})
    for name, harm in DAMAGED.items():
        found[f"one run: {name}"] = partial(_compared, harm, given={"b": {"world_size": 3}})
        found[f"two runs: {name}"] = partial(_compared, harm, given={label: {"world_size": 3} for label in "ab"})
    return found


def _compared(change: Callable[[Path], object] | None, path: Path, given: dict[str, Given]) -> str:
    folders = [write_trace(path / name, **of_run) for name, of_run in given.items()]
    if change:
        change(folders[-1])
    return outputs(*folders)


@pytest.mark.parametrize("name", scenes())
def test_the_command_answers_as_before(tmp_path: Path, name: str) -> None:
    assert scenes()[name](tmp_path) == texts_in(EXPECTED)[name]


if __name__ == "__main__":
    rewrite(EXPECTED, scenes())
