"""The records of a trace, one dataclass per kind of line, with conversion to and from JSON objects. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from legacy_ddp._errors import TraceError
from legacy_ddp._text import plain
from legacy_ddp.debug._trace import validate
from legacy_ddp.debug._trace.line_format import FORMAT, READABLE_VERSIONS, VERSION

MAX_INPUTS = 64
MAX_STEP = 10**15  # more than any training takes, and less than the largest step number of a line
NO_OPTIMIZER = "none given"  # the fact "optimizer" of a recorder without an optimizer
MAX_WORLD_SIZE = 2**20  # for a file with a larger number, a reader would list all ranks without a file
_int64 = validate.count_below(2**63)  # for the arrays of a page


@dataclass(frozen=True)
class Environment:
    """The first line: the surroundings of this rank, and the steps to record.

    ``facts``: versions, threads, flags and settings as text. ``parameters``: all names, sorted. ``job``: 16 hex digits,
    equal on all ranks of one launcher. ``layout``: 16 hex digits, equal for equal parameters and equal settings of the
    wrapper. ``local_buffers``: names and patterns of buffers that may differ between ranks. ``started``: UTC, ISO 8601.
    """

    rank: int
    world_size: Annotated[int, validate.count_below(MAX_WORLD_SIZE + 1)]
    every: int
    first_step: int
    started: str
    job: str
    layout: str
    facts: Mapping[str, str]
    parameters: tuple[str, ...]
    local_buffers: tuple[str, ...] = ()

    @property
    def has_optimizer(self) -> bool:
        """Whether the recorder was given an optimizer."""
        return self.facts.get("optimizer", NO_OPTIMIZER) != NO_OPTIMIZER

    def to_json(self) -> dict[str, Any]:
        return {"line": "environment", "format": FORMAT, "version": VERSION, **vars(self)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Environment":
        return Environment(**validate.read_fields(Environment, values))


@dataclass(frozen=True)
class Names:
    """The names of the entries of a phase; a file declares them once and refers to them by number.

    ``kinds``: dtype and shape of each tensor; empty for a setting.
    """

    phase: str
    names: tuple[str, ...]
    kinds: tuple[str, ...]

    def to_json(self, number: int) -> dict[str, Any]:
        return {"line": "names", "number": number, **vars(self)}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> tuple[int, "Names"]:
        names, number = (
            validate.read_field(values, "names", validate.distinct_texts),
            validate.read_field(values, "number", validate.as_count),
        )
        kinds = validate.read_field(values, "kinds", validate.sequence_of(validate.as_text), len(names))
        return number, Names(validate.read_field(values, "phase", validate.as_phase), names, kinds)


@dataclass(frozen=True)
class Values:
    """The state of a rank in one phase of one step, one entry per name.

    ``words``: digest of a tensor (16 hex digits), or text of a setting; None for a missing gradient. ``norms``: 2-norm
    of the finite elements of a tensor; None without a norm. ``nonfinite``: number of NaN or infinite elements, by
    position, without zeros.
    """

    words: tuple[str | None, ...]
    norms: tuple[float | None, ...]
    nonfinite: Mapping[int, int] = field(default_factory=dict)

    def to_json(self, step: int, phase: str, number: int) -> dict[str, Any]:
        # The order of keys is part of the format: a reader compares lines without parsing them.
        values = {"words": self.words, "norms": self.norms, "nonfinite": [*self.nonfinite.items()]}
        return {"line": "values", "step": step, "phase": phase, "names": number, **values}

    @staticmethod
    def from_json(values: Mapping[str, Any], size: int) -> "Values":
        nonfinite = validate.sequence_of(validate.pair_of(validate.count_below(size), _int64))
        return Values(
            words=validate.read_field(values, "words", validate.as_digests, size),
            norms=validate.read_field(values, "norms", validate.as_norms, size),
            nonfinite=dict(validate.read_field(values, "nonfinite", nonfinite)),
        )


@dataclass(frozen=True)
class Section:
    """:class:`Values` with their :class:`Names`."""

    names: Names
    values: Values

    @property
    def words(self) -> dict[str, str | None]:
        """Digests of tensors and texts of settings, by name."""
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
        """Number of NaN or infinite elements, by name, without zeros."""
        return {self.names.names[index]: count for index, count in self.values.nonfinite.items()}


@dataclass(frozen=True)
class CallFacts:
    """Facts about one call on this rank, known without its tensors.

    ``sample_size``: of this rank, None for a plain call. ``divisor``: of the summed gradients. ``local_norm``,
    ``finite``: of the gradients before the reduction; None if not measured. ``seconds``: wall time of this rank per
    phase. ``seconds_waited``: in this call, for the headers of the other ranks. ``generators``: 16 hex digits for the
    random generators of torch at the beginning of the call. ``inputs``: the first ``MAX_INPUTS`` arguments of the
    forward passes since the last call: dtype and shape of a tensor or type of a number or text, and 64 bits.
    ``forwards``: number of these passes. ``inputs_complete``: no other arguments were passed. ``metrics``: their sums
    over the ranks.
    """

    call: int
    micro_batches: int
    sample_size: Annotated[int, _int64] | None
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
    metrics: Annotated[Mapping[str, float], validate.mapping_of(validate.as_metric)] = field(default_factory=dict)

    def to_json(self, step: int) -> dict[str, Any]:
        metrics = {name: plain(value) for name, value in self.metrics.items()}
        return {"line": "call", "step": step, **vars(self), "metrics": metrics}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "CallFacts":
        return CallFacts(**validate.read_fields(CallFacts, {"metrics": {}, **values}))  # version 1 has no metrics


def log_to_json(step: int, values: Mapping[str, float | str]) -> dict[str, Any]:
    """A line of values that a rank logged after the call of a step."""
    return {"line": "log", "step": step, "values": {name: plain(value) for name, value in values.items()}}


def logged_values(values: Mapping[str, Any]) -> dict[str, float | str]:
    return validate.read_field(values, "values", validate.mapping_of(validate.as_logged))


def end_to_json(step: int, reason: str) -> dict[str, Any]:
    """The last line of a trace after an orderly end: the last step, and ``closed`` or the name of an exception."""
    return {"line": "end", "step": step, "reason": reason}


def end_reason(values: Mapping[str, Any]) -> str:
    return validate.read_field(values, "reason", validate.as_text)


def check_version(values: Mapping[str, Any]) -> None:
    """Refuse a first line of another format or version.

    Raises:
        TraceError: the text has the version of the line.
    """
    if values.get("line") != "environment" or values.get("format") != FORMAT:
        raise TraceError(f"is no trace: got a first line of another kind, expected one of format {FORMAT!r}")
    if values.get("version") not in READABLE_VERSIONS:
        *others, last = map(str, READABLE_VERSIONS)
        readable = f"{', '.join(others)} or {last}"
        raise TraceError(
            f"is of another version: got {values.get('version')!r}, expected {readable}; read it with the legacy_ddp "
            "that wrote it"
        )
