"""The file of a rank in a trace, read as docs/trace-format.md describes it."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from legacy_ddp.debug import digest

RANK_FILE = "rank-{:05}.jsonl"
PHASES = ("local_gradients", "reduced_gradients", "settings", "optimizer", "parameters", "buffers")

_NOT_FINITE = {text: float(text) for text in ("nan", "inf", "-inf")}


def word_of(values: Any) -> str:
    return f"{digest(torch.as_tensor(values)) % 2**64:016x}"


class Section(NamedTuple):
    """The values of a phase in a step, each by the name of its entry."""

    words: Mapping[str, str | None]
    norms: Mapping[str, float | None]
    nonfinite: Mapping[str, int]


class Recorded:
    """All lines of a file. The last line may be torn; a test fails for any other damage.

    ``end``: the reason of the end line, empty without one. ``environment`` and the values of ``calls`` have an
    attribute for each member of their line. ``sections``: by step and phase. ``operations``, ``logged``: by step.
    ``inputs`` and ``outputs`` of an operation: kind, layout and digest of each tensor.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        *lines, _ = (folder / RANK_FILE.format(rank)).read_bytes().split(b"\n")
        first, *others = [_members(line, number) for number, line in enumerate(lines, start=1)]
        assert first.pop("line") == "environment"
        self.environment = SimpleNamespace(**{name: _tuples(value) for name, value in first.items()})
        self.end = ""
        self.calls: dict[int, SimpleNamespace] = {}
        self.sections: dict[tuple[int, str], Section] = {}
        self.operations: dict[int, tuple[SimpleNamespace, ...]] = {}
        self.logged: dict[int, dict[str, Any]] = {}
        self._names: list[dict[str, Any]] = []
        self._declared: list[dict[str, Any]] = []
        steps = [line["step"] for line in others if "step" in line and line["line"] != "end"]
        assert steps == sorted(steps)
        self.steps = sorted({*steps})
        for line in others:
            getattr(self, f"_add_{line.pop('line')}")(**line)

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases of any step, in the order of training."""
        return tuple(phase for phase in PHASES if any(phase == held for _, held in self.sections))

    def words(self, step: int, phase: str) -> Mapping[str, str | None] | None:
        """The words of a section by name; None without the section."""
        found = self.sections.get((step, phase))
        return None if found is None else found.words

    def _add_names(self, number: int, **members: Any) -> None:
        assert number == len(self._names)
        self._names.append(members)

    def _add_values(
        self, step: int, phase: str, names: int, words: list[Any], norms: list[Any], nonfinite: list[Any]
    ) -> None:
        declared = self._names[names]
        assert (declared["phase"], (step, phase) in self.sections) == (phase, False)
        of = declared["names"]
        columns = (dict(zip(of, column, strict=True)) for column in (words, norms))
        self.sections[step, phase] = Section(*columns, {of[index]: number for index, number in nonfinite})

    def _add_call(self, step: int, metrics: Mapping[str, Any], **members: Any) -> None:
        found = {name: _tuples(value) for name, value in members.items()}
        self.calls[step] = SimpleNamespace(**found, metrics=_numbers(metrics))

    def _add_operation(self, number: int, **members: Any) -> None:
        assert number == len(self._declared)
        self._declared.append(members)

    def _add_operations(self, step: int, micro_batch: int, numbers: list[int], digests: str) -> None:
        words = iter([digests[at : at + 16] for at in range(0, len(digests), 16)])
        found = []
        for number in numbers:
            held = self._declared[number]
            values = [
                (kind, layout, next(words) if digested else None)
                for (kind, layout), digested in zip(held["inputs"] + held["outputs"], held["digested"], strict=True)
            ]
            count = len(held["inputs"])
            found.append(
                SimpleNamespace(
                    **{name: _tuples(held[name]) for name in ("name", "stage", "module", "parameters", "settings")},
                    micro_batch=micro_batch,
                    inputs=tuple(values[:count]),
                    outputs=tuple(values[count:]),
                    generator=next(words) if held["is_random"] else "",
                )
            )
        assert next(words, None) is None
        self.operations[step] = (*self.operations.get(step, ()), *found)

    def _add_log(self, step: int, values: dict[str, Any]) -> None:
        self.logged.setdefault(step, {}).update(_numbers(values))

    def _add_end(self, reason: str, **_: int) -> None:
        self.end = reason


def _members(line: bytes, number: int) -> dict[str, Any]:
    """The members of a line but the last two, after a check of these."""
    body, _, seal = line.rpartition(b',"crc32":')
    members: dict[str, Any] = json.loads(line)
    assert seal == f'"{zlib.crc32(body):08x}"}}'.encode()
    assert (members.pop("at"), bool(members.pop("crc32"))) == (number, True)
    return members


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with numbers in place of the texts for numbers that are not finite."""
    return {name: _NOT_FINITE.get(value, value) for name, value in values.items()}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
