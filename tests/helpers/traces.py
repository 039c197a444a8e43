"""Small synthetic traces, with differences where a test needs them."""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from legacy_ddp.debug._operations.operation import Operation
from legacy_ddp.debug._trace.records import PHASES, CallFacts, Environment, Names, Section, Values, Writer

NAMES = {
    "local_gradients": ("gradient of 'a'", "gradient of 'b'"),
    "reduced_gradients": ("gradient of 'a'", "gradient of 'b'"),
    "settings": ("lr of parameter group 0",),
    "optimizer": ("exp_avg of 'a'", "exp_avg of 'b'"),
    "parameters": ("parameter 'a'", "parameter 'b'"),
    "buffers": ("buffer 'mean'",),
}
KIND = "float32 (2, 3)"
START = ("settings", "parameters", "buffers")

# (rank, step, phase, name) -> planted entry: (digest, norm), or (digest, norm, number of non-finite elements).
Planted = Mapping[tuple[int, int, str, str], tuple[Any, ...]]


def environment(rank: int, world_size: int, **changes: Any) -> Environment:
    given: dict[str, Any] = {
        "rank": rank,
        "world_size": world_size,
        "every": 1,
        "first_step": 1,
        "started": "2026-01-02T03:04:05+00:00",
        "job": "00000000000000bb",
        "layout": "00000000000000aa",
        "facts": {"torch": "2.13.0", "threads": "1", "seed": "0"},
        "parameters": ("a", "b"),
        "local_buffers": (),
    }
    return Environment(**{**given, **changes})


def call_facts(step: int, rank: int, **changes: Any) -> CallFacts:
    given: dict[str, Any] = {
        "call": step,
        "micro_batches": 2,
        "sample_size": 64,
        "took_part": True,
        "divisor": 128,
        "local_norm": 1.0 + rank + step / 8,
        "finite": True,
        "payload_bytes": 48,
        "seconds": {"plan": 0.001, "pack": 0.002, "agree": 0.003, "payload": 0.004, "alias": 0.001},
        "seconds_waited": 0.01 * rank,
        "generators": f"{step:016x}",
        "forwards": 2,
        "inputs": (("int64 (16, 64)", f"{16 * step + rank:016x}"), ("int64 (16, 64)", f"{16 * step + rank + 8:016x}")),
        "inputs_complete": True,
    }
    return CallFacts(**{**given, **changes})


def write_trace(
    folder: Path,
    *,
    world_size: int = 2,
    steps: int = 5,
    planted: Planted | None = None,
    names: Mapping[str, tuple[str, ...]] = NAMES,
    start: Sequence[str] = START,
    kind: str = KIND,
    environments: Callable[[int, int], Environment] = environment,
    calls: Callable[[int, int], CallFacts] = call_facts,
    logs: Callable[[int, int], Mapping[str, float | str]] | None = None,
    operations: Callable[[int, int], Sequence[Operation]] | None = None,
    end: str | None = "closed",
) -> Path:
    """A run of ``steps`` steps with ranks that agree in everything but local gradients and ``planted`` entries.

    ``start``: the phases at the start. ``calls``, ``logs``, ``operations``: of a step and rank.
    """
    for rank in range(world_size):
        facts = environments(rank, world_size)
        writer = Writer(folder, facts)
        first = facts.first_step
        for step in range(first - 1, first + steps):
            for phase in PHASES if step >= first else start:
                if phase == "reduced_gradients":
                    writer.call(step, calls(step, rank))
                    writer.operations(step, operations(step, rank) if operations else ())
                if names.get(phase):
                    writer.section(step, section(rank, step, phase, names[phase], kind, planted or {}))
            if logs and (logged := logs(step, rank)):
                writer.log_now(step, logged)
            writer.flush()
        if end is None:
            writer.abandon()
        else:
            writer.close(first + steps - 1, end)
    return folder


def section(rank: int, step: int, phase: str, names: tuple[str, ...], kind: str, planted: Planted) -> Section:
    """A section with digests derived from step, phase and position; of local gradients from the rank, too."""
    start = (step << 24) + (PHASES.index(phase) << 16) + (rank + 1 if phase == "local_gradients" else 0)
    usual = [(f"{start + (index << 8):016x}", 1.0 + index + step / 8) for index in range(len(names))]
    if phase == "settings":
        usual, kind = [("0.001", None)] * len(names), ""
    entries = [planted.get((rank, step, phase, name), held) for name, held in zip(names, usual, strict=True)]
    digests, norms = (tuple(entry[at] for entry in entries) for at in range(2))
    nonfinite = {index: count[0] for index, (_, _, *count) in enumerate(entries) if count}
    return Section(Names(phase, names, (kind,) * len(names)), Values(digests, norms, nonfinite))


def without(path: Path, gone: Callable[[bytes], bool]) -> None:
    """Remove the lines matched by ``gone`` and renumber the rest."""
    kept = [line for line in lines_of(path.read_bytes()) if not gone(line)]
    path.write_bytes(b"".join(sealed(line.rpartition(b',"at":')[0], at) for at, line in enumerate(kept, start=1)))


def end_after(path: Path, last: int | None) -> None:
    """Remove all lines after step ``last``, as after a kill; None: all lines after the environment."""
    step = re.compile(rb'"step":(\d+)')

    def is_later(line: bytes) -> bool:
        if last is None or b'"line":"end"' in line:
            return b'"line":"environment"' not in line
        found = step.search(line)
        return found is not None and int(found[1]) > last

    without(path, is_later)


def tear(path: Path) -> None:
    """Remove the end of the last line."""
    path.write_bytes(path.read_bytes()[:-30])


def lines_of(data: bytes) -> list[bytes]:
    """The lines of a file; only ``\\n`` ends a line."""
    parts = data.split(b"\n")
    return [part + b"\n" for part in parts[:-1]] + parts[-1:] * bool(parts[-1])


def sealed(body: bytes, at: int = 1) -> bytes:
    """Line ``at`` with a valid checksum. ``body``: a JSON object without its closing brace."""
    checked = body + f',"at":{at}'.encode()
    return checked + f',"crc32":"{zlib.crc32(checked):08x}"}}\n'.encode()
