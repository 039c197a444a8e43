"""Traces of arbitrary content for tests of files: drawn as events, written by a Writer, read into a dictionary."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import strategies as st

from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.records import PHASES, CallFacts, Environment, Names, Section, Values, Writer

Held = dict[tuple[int, str], Section | CallFacts]
Event = tuple[int, Section | CallFacts]

counts = st.integers(0, 2**63 - 1)
# Quotes, commas and keys of the format: a reader that does not parse might mistake them for the end of a text.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['"', "\n", "\\", "a\r\n", "é\u2028", "😀", ',"norms":', '","phase":"', '"}\n', ',"crc32":"00000000"}', "\0", ""]
)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -0.0, 5e-324, 1e-310, 1e308])


@dataclass(frozen=True)
class Scenario:
    """The events that a rank records, in order. ``end``: as in the file; None for no end line."""

    environment: Environment
    events: tuple[Event, ...]
    end: str | None


environments = st.builds(
    Environment,
    rank=st.integers(0, 200_000),
    world_size=st.integers(0, 2**20),
    every=counts,
    first_step=counts,
    started=texts,
    job=texts,
    layout=texts,
    facts=st.dictionaries(texts, texts, max_size=3),
    parameters=st.lists(texts, max_size=3).map(tuple),
    local_buffers=st.lists(texts, max_size=2).map(tuple),
)
calls = st.builds(
    CallFacts,
    call=counts,
    micro_batches=counts,
    sample_size=st.none() | counts,
    took_part=st.booleans(),
    divisor=counts,
    local_norm=st.none() | numbers,
    finite=st.none() | st.booleans(),
    payload_bytes=counts,
    seconds=st.dictionaries(texts, numbers, max_size=2),
    seconds_waited=numbers,
    generators=texts,
    forwards=counts,
    inputs=st.lists(st.tuples(texts, texts), max_size=2).map(tuple),
    inputs_complete=st.booleans(),
    parts=st.dictionaries(st.sampled_from(["data", "forward", "backward"]), numbers),
)


@st.composite
def sections(draw: st.DrawFn, phase: str) -> Section:
    names = draw(st.lists(texts, max_size=3, unique=True))
    size = len(names)

    def column(of: st.SearchStrategy[object]) -> tuple[object, ...]:
        return tuple(draw(st.lists(of, min_size=size, max_size=size)))

    nonfinite = draw(st.dictionaries(st.integers(0, size - 1), counts, max_size=size)) if size else {}
    return Section(
        Names(phase, tuple(names), column(texts)),  # type: ignore[arg-type]
        Values(column(st.none() | texts), column(st.none() | numbers), nonfinite),  # type: ignore[arg-type]
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    known: list[Section] = []
    events: list[Event] = []
    for step in sorted(draw(st.sets(st.integers(0, 10**18 - 1), max_size=4))):
        for column in draw(st.lists(st.sampled_from([*PHASES, "call"]), unique=True, max_size=4)):
            if column == "call":
                events.append((step, draw(calls)))
                continue
            again = [section for section in known if section.names.phase == column]
            known.append(draw(st.sampled_from(again) | sections(column) if again else sections(column)))
            events.append((step, known[-1]))
    return Scenario(draw(environments), tuple(events), draw(st.none() | texts.filter(bool)))


def write_scenario(scenario: Scenario) -> tuple[bytes, list[int]]:
    """The file of the scenario, and its sizes after the first line, each event and the end."""
    with TemporaryDirectory() as folder:
        writer = Writer(Path(folder), scenario.environment)
        sizes = [writer.path.stat().st_size]
        for step, what in scenario.events:
            if isinstance(what, Section):
                writer.section(step, what)
            else:
                writer.call(step, what)
            writer.flush()
            sizes.append(writer.path.stat().st_size)
        if scenario.end is None:
            writer.abandon()
        else:
            writer.close(7, scenario.end)
        return writer.path.read_bytes(), [*sizes, writer.path.stat().st_size]


def held(events: Sequence[Event]) -> Held:
    return {(step, what.names.phase if isinstance(what, Section) else "call"): what for step, what in events}


def contents_of(trace: RankTrace) -> Held:
    found: Held = {}
    for step in trace.steps:
        for phase in PHASES:
            if (section := trace.section(step, phase)) is not None:
                assert trace.digest(step, phase) is not None
                assert phase in trace.phases
                assert section.nonfinite.keys() <= section.norms.keys() == {*section.names.names}
                found[step, phase] = section
            else:
                assert trace.digest(step, phase) is None
        if (call := trace.call(step)) is not None:
            found[step, "call"] = call
    return found


@contextmanager
def trace_of(data: bytes) -> Iterator[RankTrace]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "rank-00000.jsonl")
        path.write_bytes(data)
        with RankTrace(path) as trace:
            yield trace
