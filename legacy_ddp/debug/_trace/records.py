"""What do the lines of a trace mean? A dataclass a line, and the way from its members and back. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from legacy_ddp._errors import TraceError
from legacy_ddp.debug._trace.line_format import FORMAT, VERSION
from legacy_ddp.debug._trace.validate import (
    Members,
    as_norms,
    as_number,
    as_phase,
    as_text,
    as_truth,
    below,
    distinct_texts,
    entries_of,
    mapping_of,
    optional,
    pair_of,
    sequence_of,
)

_TOO_LARGE = 2**63  # for an integer of an array, such as those that a page is made from
MAX_WORLD_SIZE = 2**20  # a file that says more would have a reader list all ranks that it lacks


@dataclass(frozen=True)
class Environment:
    """The first line: where this rank ran, and what it recorded.

    ``facts``: versions, threads, flags and settings in words. ``parameters``: names of all of them, sorted.
    ``job``: 16 hex digits, equal on all ranks that one launcher started. ``layout``: 16 hex digits, equal where
    parameters and settings of the wrapper are. ``local_buffers``: names and
    patterns of buffers that each rank has of its own. ``started``: UTC, ISO 8601.
    """

    rank: int
    world_size: int
    every: int
    first_step: int
    started: str
    job: str
    layout: str
    facts: Mapping[str, str]
    parameters: tuple[str, ...]
    local_buffers: tuple[str, ...] = ()

    def members(self) -> dict[str, Any]:
        return {"line": "environment", "format": FORMAT, "version": VERSION, **_plain(self)}

    @staticmethod
    def of(members: Mapping[str, Any]) -> "Environment":
        get = Members(members)
        return Environment(
            rank=get.count("rank"),
            world_size=get("world_size", below(MAX_WORLD_SIZE + 1)),
            every=get.count("every"),
            first_step=get.count("first_step"),
            started=get("started", as_text),
            job=get("job", as_text),
            layout=get("layout", as_text),
            facts=get("facts", mapping_of(as_text)),
            parameters=get("parameters", sequence_of(as_text)),
            local_buffers=get("local_buffers", sequence_of(as_text)),
        )


@dataclass(frozen=True)
class Names:
    """What the entries of a phase are called, declared once and referred to by number.

    ``kinds``: what each is: dtype and shape of a tensor; empty for a setting.
    """

    phase: str
    names: tuple[str, ...]
    kinds: tuple[str, ...]

    def members(self, number: int) -> dict[str, Any]:
        return {"line": "names", "number": number, **_plain(self)}

    @staticmethod
    def of(members: Mapping[str, Any]) -> tuple[int, "Names"]:
        get = Members(members)
        names = get("names", distinct_texts)
        return get.count("number"), Names(get("phase", as_phase), names, get("kinds", sequence_of(as_text), len(names)))


@dataclass(frozen=True)
class Values:
    """What a rank held in one phase of one step, an entry for each name.

    ``words``: a tensor's digest (16 hex digits); a setting in words; None for a gradient that is not there. ``norms``:
    2-norm of a tensor's finite elements; None for what has none. ``nonfinite``: how many elements are NaN or infinite,
    by position, where there are any.
    """

    words: tuple[str | None, ...]
    norms: tuple[float | None, ...]
    nonfinite: Mapping[int, int] = field(default_factory=dict)

    def members(self, step: int, phase: str, number: int) -> dict[str, Any]:
        # The order of members is part of the format: a reader compares lines without parsing them.
        values = {"words": self.words, "norms": self.norms, "nonfinite": [*self.nonfinite.items()]}
        return {"line": "values", "step": step, "phase": phase, "names": number, **values}

    @staticmethod
    def of(members: Mapping[str, Any], size: int) -> "Values":
        get = Members(members)
        return Values(
            words=get("words", entries_of(str), size),
            norms=get("norms", as_norms, size),
            nonfinite=dict(get("nonfinite", sequence_of(pair_of(below(size), below(_TOO_LARGE))))),
        )


@dataclass(frozen=True)
class Section:
    """:class:`Values` with their :class:`Names`."""

    names: Names
    values: Values

    @property
    def words(self) -> dict[str, str | None]:
        """What was held, by name."""
        return dict(zip(self.names.names, self.values.words, strict=True))

    @property
    def norms(self) -> dict[str, float | None]:
        """2-norms, by name."""
        return dict(zip(self.names.names, self.values.norms, strict=True))

    @property
    def kinds(self) -> dict[str, str]:
        """Dtype and shape, by name."""
        return dict(zip(self.names.names, self.names.kinds, strict=True))

    @property
    def nonfinite(self) -> dict[str, int]:
        """How many elements are NaN or infinite, by name, where there are any."""
        return {self.names.names[index]: count for index, count in self.values.nonfinite.items()}


@dataclass(frozen=True)
class CallFacts:
    """The host's side of one call, as this rank saw it.

    ``sample_size``: its own, None for a plain call; ``divisor``: what the summed gradients were divided by.
    ``local_norm``, ``finite``: of its gradients before the reduction; None where they were not taken. ``seconds``: own
    wall time per phase. ``seconds_waited``: for the other ranks' headers, in this call. ``generators``: 16 hex digits
    for torch's random generators as the call found them. ``inputs``: what the forward passes since the last call were
    given, the first ``MAX_INPUTS`` values: dtype and shape of a tensor, or the type of a number or text, and 64 bits.
    ``forwards``: number of those passes. ``inputs_complete``: those values are all that went in.
    """

    call: int
    micro_batches: int
    sample_size: int | None
    took_part: bool
    divisor: int
    local_norm: float | None
    finite: bool | None
    payload_bytes: int
    seconds: Mapping[str, float]
    seconds_waited: float
    generators: str
    forwards: int
    inputs: tuple[tuple[str, str], ...]
    inputs_complete: bool

    def members(self, step: int) -> dict[str, Any]:
        return {"line": "call", "step": step, **_plain(self)}

    @staticmethod
    def of(members: Mapping[str, Any]) -> "CallFacts":
        get = Members(members)
        return CallFacts(
            call=get.count("call"),
            micro_batches=get.count("micro_batches"),
            sample_size=get("sample_size", optional(below(_TOO_LARGE))),
            took_part=get("took_part", as_truth),
            divisor=get.count("divisor"),
            local_norm=get("local_norm", optional(as_number)),
            finite=get("finite", optional(as_truth)),
            payload_bytes=get.count("payload_bytes"),
            seconds=get("seconds", mapping_of(as_number)),
            seconds_waited=get("seconds_waited", as_number),
            generators=get("generators", as_text),
            forwards=get.count("forwards"),
            inputs=get("inputs", sequence_of(pair_of(as_text, as_text))),
            inputs_complete=get("inputs_complete", as_truth),
        )


MAX_INPUTS = 64
MAX_STEP = 10**15  # more than any training takes, and less than what a line may say


def end_members(step: int, reason: str) -> dict[str, Any]:
    """The last line of a trace that was ended in order: the last step, and how its block was left."""
    return {"line": "end", "step": step, "reason": reason}


def end_reason(members: Mapping[str, Any]) -> str:
    return Members(members)("reason", as_text)


def check_version(members: Mapping[str, Any]) -> None:
    """Refuse what is no first line of a trace, or one of another version.

    Raises:
        TraceError: with what was got.
    """
    if members.get("line") != "environment" or members.get("format") != FORMAT:
        raise TraceError(f"is no trace: got a first line of another kind, expected one of format {FORMAT!r}")
    if members.get("version") != VERSION:
        raise TraceError(
            f"is of another version: got {members.get('version')!r}, expected {VERSION}; read it with the legacy_ddp "
            "that wrote it"
        )


def _plain(record: Any) -> dict[str, Any]:
    return dict(vars(record))
