"""`legacy-ddp diff`: the step and the ranks with compared operations of two runs, and notes about operations."""

from collections.abc import Callable, Sequence
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import command
from tests.helpers.operations import Operation, operation
from tests.helpers.scenes import rewrite, texts_in
from tests.helpers.traces import NAMES, call_facts, write_trace

EXPECTED = Path(__file__).with_name("compared.txt")
DATA = "0a" * 8, "0b" * 8
Given = dict[str, Any]


def sequence(rank: int, *, wrong: int | None = None, extra: bool = False) -> list[Operation]:
    """Four operations on data of the rank. ``wrong``: that with another output. ``extra``: one with its own result."""
    found, held = [], f"{rank:016x}"
    for index in range(4):
        out = f"{17 * (index + 1) + (index == wrong) + 1000 * rank:016x}"
        found.append(operation("mul", [held, "b" * 16], [out], module=f"m{index}", parameters=("", "a")))
        held = out
    return [*found, operation("neg", [held], [f"{5000 + rank:016x}"], module="m4")] if extra else found


def recorded(of: Callable[[int, int], Sequence[Operation]], *steps: int) -> Given:
    return {"operations": lambda step, rank: of(step, rank) if step in steps else ()}


def of_steps(*steps: int, **changes: Any) -> Given:
    return recorded(lambda _, rank: sequence(rank, **changes), *steps)


def differing(*ranks: int, phase: str | None = "local_gradients") -> Given:
    """Another tensor in step 3."""
    return {"planted": {(rank, 3, phase, NAMES[phase][0]): ("ee" * 8, 9.0) for rank in ranks} if phase else {}}


def reading(data: str, argument: str) -> Given:
    """An operation that reads ``data``; ``argument``: of the forward pass."""
    calls = partial(call_facts, inputs=(("float32 (4, 8)", argument),), forwards=1)
    return {**recorded(lambda *_: [operation("mul", [data], [data[::-1]])], 3), "calls": calls}


BACKWARD = [*sequence(0), operation("mul", stage="backward")]
SCALED = [*BACKWARD, operation("mul_", ["aa" * 8], ["bb" * 8])]

# A, and B; or one run.
CASES: dict[str, tuple[Given, ...]] = {
    "the first different step and rank": (
        of_steps(2, 3, 4),
        recorded(lambda step, rank: sequence(rank, wrong=(3, 1)[rank] if step == 3 else 0), 2, 3, 4) | differing(1),
    ),
    "ranks with the same first difference": (of_steps(3), of_steps(3, wrong=2) | differing(0, 1)),
    **{
        f"equal operations, other {phase}": (of_steps(3), of_steps(3) | differing(1, phase=phase))
        for phase in ("local_gradients", "reduced_gradients", "parameters")
    },
    **{
        f"steps {a} and {b}, not that of the first difference": (of_steps(*a), of_steps(*b) | differing(1))
        for a, b in (((3,), ()), ((), (3,)), ((2,), (2,)))
    },
    **{
        f"no operations, which could not help for {phase}": ({}, differing(1, phase=phase))
        for phase in ("reduced_gradients", "parameters")
    },
    "operations alone": (of_steps(2, 4), of_steps(2, 4, wrong=1)),
    "equal operations": (of_steps(2, 4), of_steps(2, 4)),
    **{
        f"operations of B alone, other {phase}": (of_steps(3), of_steps(3, extra=True) | differing(1, phase=phase))
        for phase in ("local_gradients", "buffers", "reduced_gradients", None)
    },
    "operations of B alone behind the backward pass": (
        recorded(lambda *_: BACKWARD, 3),
        recorded(lambda *_: SCALED, 3) | differing(1),
    ),
    "other data, an argument of the forward pass": (
        reading(DATA[0], DATA[0]),
        reading(DATA[1], DATA[1]) | differing(1),
    ),
    "other data, no argument of the forward pass": (
        reading(DATA[0], DATA[0]),
        reading(DATA[1], DATA[0]) | differing(1),
    ),
    **{
        f"steps {a} and {b}, {'a difference' if planted['planted'] else 'none'}": (of_steps(*a), of_steps(*b) | planted)
        for a, b in (((1, 2), ()), ((), (3,)), ((1, 2), (3, 4)))
        for planted in (differing(1, phase=None), differing(1, phase="parameters"))
    },
    "a rank without operations": (of_steps(2), recorded(lambda _, rank: () if rank else sequence(0), 2)),
    "a rank of one run without operations": (recorded(lambda _, rank: () if rank else sequence(0), 2),),
    "other world sizes, steps (2,) and (2,)": (of_steps(2), of_steps(2) | {"world_size": 3}),
}


def told(folder: Path, case: tuple[Given, ...]) -> str:
    """The text without the parts about tensors, which scenes.txt has."""
    labels = "ab"[: len(case)]
    for label, given in zip(labels, case, strict=True):
        write_trace(folder / label, **given)
    with chdir(folder):
        parts = command("diff", *labels).stdout.rstrip().split("\n\n")
    return "\n\n".join(part for part in parts if not part.startswith(("step 3, ", "meaning: ", "1 place"))) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_operations_are_compared_as_before(tmp_path: Path, name: str) -> None:
    assert told(tmp_path, CASES[name]) == texts_in(EXPECTED)[name]


if __name__ == "__main__":
    rewrite(EXPECTED, {name: partial(told, case=case) for name, case in CASES.items()})
