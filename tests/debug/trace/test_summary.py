"""Text and JSON of `legacy-ddp show` for a set of traces, byte for byte."""

import json
import math
from collections.abc import Callable
from contextlib import chdir
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.command import command
from tests.helpers.operations import operation
from tests.helpers.recorded import RANK_FILE
from tests.helpers.scenes import rewrite, texts_in
from tests.helpers.traces import call_facts, end_after, environment, tear, without, write_trace

EXPECTED = Path(__file__).with_name("shown.txt")
ONE = [operation("mul", ["a" * 16], ["b" * 16])]


def planted(*wheres: tuple[int, int, str, str, int]) -> dict[str, Any]:
    """``wheres``: rank, step, phase, name, and number of elements that are not finite."""
    return {"planted": {(*where, name): ("ab" * 8, 1.0, count) for *where, name, count in wheres}}


def waiting(*seconds: float) -> dict[str, Any]:
    """``seconds``: that each rank waits in every step."""
    return {"calls": lambda step, rank: call_facts(step, rank, seconds_waited=seconds[rank])}


def waiting_in_turn(step: int, rank: int) -> Any:
    waits = {1: (0.5, 0.1, 0.2), 2: (0.3, 0.1, 0.5), 3: (0.0, 0.2, 0.4)}
    return call_facts(step, rank, seconds_waited=waits[step][rank])


def own_facts(rank: int, size: int) -> Any:
    return environment(rank, size, facts={"torch": "2.13.0", "host": f"node-{rank // 2}", "pid": str(rank)})


def late(step: int, rank: int) -> Any:
    """A step of rank 0 takes 40 + 20 + 30 ms, and 11 ms in the call. The others wait 20 ms, rank 1 waits 4 ms."""
    parts = {"data": 0.04, "forward": 0.035 if rank == 1 else 0.02, "backward": 0.03}
    return call_facts(step, rank, seconds_waited=0.004 if rank == 1 else 0.02, parts=parts)


def metrics(step: int, rank: int) -> Any:
    return call_facts(step, rank, metrics={"loss": 1 / step, "bad": math.nan} if step != 2 else {"once": 7.0})


def logs(step: int, rank: int) -> dict[str, float | str]:
    if rank < 2:
        return {"lr": step / 8 + rank, "note": f"at {step}, {'abcdefghij' * 5}"}
    return {"own": -math.inf} if step == 4 else {}


def killed_after_step_1(folder: Path) -> None:
    without(folder / RANK_FILE.format(0), lambda line: b'"step":2' in line or b'"step":3' in line)


def ended_one_by_one(folder: Path) -> None:
    for rank in range(6):
        end_after(folder / RANK_FILE.format(rank), rank or None)


SCENES: dict[str, dict[str, Any]] = {
    "two ranks": {},
    "every second step": {
        "environments": lambda rank, size: environment(rank, size, every=2, first_step=3),
        "steps": 1,
    },
    "a rank with a torn line": {"world_size": 3},
    "many ends": {"world_size": 6},
    "left by an error": {"end": "KeyError"},
    "facts of single ranks": {"world_size": 3, "environments": own_facts},
    "not finite, the earliest of all ranks": {
        "world_size": 3,
        **planted(
            (0, 4, "local_gradients", "gradient of 'a'", 9),
            (1, 3, "parameters", "parameter 'b'", 2),
            (2, 3, "reduced_gradients", "gradient of 'b'", 7),
        ),
    },
    "not finite, the lowest of two ranks": {
        "world_size": 3,
        **planted((2, 3, "parameters", "parameter 'b'", 3), (1, 3, "parameters", "parameter 'b'", 2)),
    },
    "a rank that waited least most often": {"world_size": 3, "steps": 3, "calls": waiting_in_turn},
    # Rank 1 seems to wait for nobody later.
    "waits in the steps of all ranks alone": {"steps": 3, "end": None},
    "ranks that others waited for equally often": {
        "steps": 2,
        "calls": lambda step, rank: call_facts(step, rank, seconds_waited=0.1 if step % 2 == rank else 0.5),
    },
    "ranks that waited alike": {"world_size": 3, **waiting(0.5, 0.5, 0.5)},
    "a late rank": {"world_size": 3, "steps": 10, "calls": late},
    "a late rank in a trace without parts": {"world_size": 3, "steps": 10, **waiting(0.5, 0.1, 0.5)},
    "one rank": {"world_size": 1},
    "a norm that no float64 holds": {
        "planted": {(0, 1, "reduced_gradients", f"gradient of '{name}'"): ("ab" * 8, 1.7e308) for name in "ab"}
    },
    "killed before the first step": {"steps": 0, "names": {}, "end": None},
    "metrics and logged values": {"world_size": 3, "calls": metrics, "logs": logs},
    "many metrics and logged values": {
        "steps": 1,
        "calls": partial(call_facts, metrics={f"m{number}": 1.0 for number in range(12)}),
        "logs": lambda *_: {f"l{number}": 2.0 for number in range(12)},
    },
    "operations": {"operations": lambda step, rank: ONE * {1: 2 - rank, 2: 1200, 4: 3}.get(step, 0)},
    "operations of one rank": {"operations": lambda step, rank: ONE if rank == 0 and step in (1, 2, 5) else ()},
    "operations of many spans of steps": {"steps": 40, "operations": lambda step, _: ONE * (step % 2)},
    "operations of many groups of ranks": {
        "world_size": 7,
        "operations": lambda step, rank: ONE if step <= rank else (),
    },
}
# What happens to the files of a scene.
HARMED: dict[str, Callable[[Path], object]] = {
    "a rank with a torn line": lambda folder: tear(folder / RANK_FILE.format(1)),
    "many ends": ended_one_by_one,
    "waits in the steps of all ranks alone": killed_after_step_1,
}


def shown(folder: Path, name: str) -> str:
    write_trace(folder / "trace", **SCENES[name])
    if name in HARMED:
        HARMED[name](folder / "trace")
    with chdir(folder):
        text, members = command("show", "trace"), command("show", "--json", "trace")
    assert (text.returncode, text.stderr, members.returncode) == (0, "", 0)
    return f"{text.stdout}{json.dumps(json.loads(members.stdout))}\n"


@pytest.mark.parametrize("name", SCENES)
def test_a_trace_is_shown_as_before(tmp_path: Path, name: str) -> None:
    assert shown(tmp_path, name) == texts_in(EXPECTED)[name]


if __name__ == "__main__":
    rewrite(EXPECTED, {name: partial(shown, name=name) for name in SCENES})
