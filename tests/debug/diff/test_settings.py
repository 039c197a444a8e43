"""Settings of the optimizer that differ: every one is listed, and none hides another or the reason beside it."""

from collections.abc import Callable, Iterable
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import command
from tests.helpers.recorded import RANK_FILE
from tests.helpers.scenes import rewrite, texts_in
from tests.helpers.traces import NAMES, environment, without, write_trace

EXPECTED = Path(__file__).with_name("settings.txt")
WORD = "ab" * 8
FOREACH, LR, LR_1, MAXIMIZE, MOMENTUM, INITIAL = (
    "foreach of parameter group 0",
    "lr of parameter group 0",
    "lr of parameter group 1",
    "maximize of parameter group 0",
    "momentum of parameter group 0",
    "initial_lr of parameter group 0",
)
WRITTEN: dict[str, Any] = {
    "names": {**NAMES, "settings": (FOREACH, INITIAL, LR, LR_1, MAXIMIZE, MOMENTUM)},
    "start": ("parameters", "buffers"),
}
LAST = 5
ALL = (0, 1)
Given = dict[str, Any]
Planted = dict[tuple[int, int, str, str], tuple[str | None, float | None]]


def setting(name: str, steps: Iterable[int], value: str | None = "9", ranks: Iterable[int] = ALL) -> Planted:
    return {(rank, step, "settings", name): (value, None) for rank in ranks for step in steps}


def tensor(step: int, phase: str = "parameters", ranks: Iterable[int] = ALL) -> Planted:
    """Another tensor from a step on."""
    return {(rank, later, phase, NAMES[phase][0]): (WORD, 1.5) for rank in ranks for later in range(step, LAST + 1)}


def until_end(first: int) -> range:
    return range(first, LAST + 1)


def one_by_one(first: int, ranks: Iterable[int] = ALL) -> Planted:
    """Another implementation of the step, which changes no bit."""
    return setting(FOREACH, until_end(first), "True", ranks)


SMALL: Planted = {(rank, 3, "optimizer", "exp_avg of 'a'"): (WORD, 1.375 * (1 + 1e-7)) for rank in ALL}
LEFT_OUT: Given = {
    "environments": lambda rank, size: environment(rank, size, facts={"optimizer": "SGD"}),
    "world_size": 3,
    "planted": tensor(3, "optimizer", ranks=(1,)),
}
# Name: what is planted in B.
PLANTED: dict[str, Planted] = {
    "a setting without effect before the rate": one_by_one(1) | setting(LR, until_end(4)) | tensor(4),
    "a setting without effect in the step of the rate": one_by_one(4) | setting(LR, until_end(4)) | tensor(4),
    "a setting without effect after the rate": one_by_one(5) | setting(LR, until_end(4)) | tensor(4),
    "a setting without effect and a write to weights": one_by_one(3) | setting(INITIAL, until_end(1)) | tensor(3),
    "the direction of a step is no such setting": setting(MAXIMIZE, until_end(3), "True") | one_by_one(3) | tensor(3),
    "a setting that acts a step later": setting(MOMENTUM, until_end(1)) | tensor(2, "optimizer"),
    "a setting that differs and comes back": setting(LR, (2, 3)) | tensor(5),
    "a setting that comes back twice": setting(LR, (1, 3)) | tensor(5),
    "one rank alone, behind one of all ranks": one_by_one(1)
    | setting(LR, until_end(3), ranks=(1,))
    | tensor(3, ranks=(1,)),
    "one rank alone, earlier": setting(LR, (2,), ranks=(1,)) | setting(LR_1, until_end(3)) | tensor(3),
    "groups of parameters": setting(LR, until_end(1)) | setting(LR_1, until_end(3), "8") | tensor(3),
    "two in one step": setting(LR, until_end(3)) | setting(MOMENTUM, until_end(3)) | tensor(3),
    "a setting that one trace alone holds": setting(MOMENTUM, until_end(1), None)
    | setting(LR, until_end(3))
    | tensor(3),
    "a setting that one trace alone holds, and a write": setting(MOMENTUM, until_end(3), None) | tensor(3),
    "a number in another form": setting(MOMENTUM, until_end(1), "1e-3") | tensor(3),
    "a rate used after the gradients that differ": setting(LR, until_end(3)) | tensor(3, "local_gradients"),
    "a setting of another rank": setting(LR, until_end(3), ranks=(0,)) | tensor(3, ranks=(1,)),
    "another implementation, and a difference of rounding size": one_by_one(1) | SMALL,
    "another implementation, and a larger difference": one_by_one(1) | tensor(3, "optimizer"),
    "settings that changed no bit": setting(LR, (4,)) | setting(FOREACH, (1, 2), "True", (0,)),
    "a step without settings": tensor(2),
}
# Name: A and B, or one run.
SCENES: dict[str, tuple[Given, ...]] = {
    **{name: ({}, {"planted": planted}) for name, planted in PLANTED.items()},
    "the ranks of one run": (
        {
            "world_size": 3,
            "planted": one_by_one(1, (1,)) | setting(LR, until_end(4), ranks=(1,)) | tensor(4, ranks=(1,)),
        },
    ),
    "settings that changed no bit in the ranks of one run": ({"world_size": 3, "planted": one_by_one(1, (1,))},),
    "a step that one rank left out": ({**LEFT_OUT, "planted": {}}, LEFT_OUT),
    "a step that one rank of one run left out": (LEFT_OUT,),
    "a resume on another number of ranks": (
        {},
        {
            "environments": lambda rank, size: environment(rank, size, first_step=4),
            "steps": 2,
            "world_size": 4,
            "planted": setting(LR, (4, 5), ranks=range(4)) | tensor(4, ranks=range(4)),
        },
    ),
}


def _without_settings(step: int, *ranks: int) -> Callable[[Path], None]:
    gone = f'"step":{step},"phase":"settings"'.encode()

    def change(folder: Path) -> None:
        for rank in ranks:
            without(folder / RANK_FILE.format(rank), lambda line: gone in line)

    return change


# What happens to the files of B, or of the one run.
HARMED = {
    "a step without settings": _without_settings(4, 0, 1),
    "a step that one rank left out": _without_settings(3, 1),
    "a step that one rank of one run left out": _without_settings(3, 1),
}


def told(folder: Path, name: str) -> str:
    labels = "ab"[: len(SCENES[name])]
    for label, given in zip(labels, SCENES[name], strict=True):
        write_trace(folder / label, **{**WRITTEN, **given})
    if name in HARMED:
        HARMED[name](folder / labels[-1])
    with chdir(folder):
        return command("diff", *labels).stdout


@pytest.mark.parametrize("name", SCENES)
def test_every_setting_that_differs_up_to_the_first_difference_is_listed(tmp_path: Path, name: str) -> None:
    assert told(tmp_path, name) == texts_in(EXPECTED)[name]


if __name__ == "__main__":
    rewrite(EXPECTED, {name: partial(told, name=name) for name in SCENES})
