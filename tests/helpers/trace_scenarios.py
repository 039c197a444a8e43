"""Traces of any content, for tests of files: told as events, written as a recorder would, read back as a dictionary."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from legacy_ddp.debug._trace.line_format import PHASES
from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.records import CallFacts, Environment, Names, Section, Values
from legacy_ddp.debug._trace.write import Writer

Held = dict[tuple[int, str], Section | CallFacts]
Event = tuple[int, Section | CallFacts]

counts = st.integers(0, 2**63 - 1)
# Quotes, commas and the names of members are what a reader that does not parse might stumble over.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['"', "\n", "\\", "a\r\n", "é\u2028", "😀", ',"norms":', '","phase":"', '"}\n', ',"crc32":"00000000"}', "\0", ""]
)
numbers = st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from([0.0, -0.0, 5e-324, 1e-310, 1e308])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@dataclass(frozen=True)
class Story:
    """What a rank records: its environment, events in order, and how it ended; None for not at all."""

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
def stories(draw: st.DrawFn) -> Story:
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
    return Story(draw(environments), tuple(events), draw(st.none() | texts.filter(bool)))


def told(story: Story, folder: Path) -> tuple[Path, list[int]]:
    """The story's file; and its size after its first line, after each event and after its end."""
    writer = Writer(folder, story.environment)
    sizes = [writer.path.stat().st_size]
    for step, what in story.events:
        if isinstance(what, Section):
            writer.section(step, what)
        else:
            writer.call(step, what)
        writer.flush()
        sizes.append(writer.path.stat().st_size)
    if story.end is None:
        writer.abandon()
    else:
        writer.close(7, story.end)
    return writer.path, [*sizes, writer.path.stat().st_size]


def held(events: Sequence[Event]) -> Held:
    return {(step, what.names.phase if isinstance(what, Section) else "call"): what for step, what in events}


def held_by(trace: RankTrace) -> Held:
    """Everything that a trace says."""
    found: Held = {}
    for step in trace.steps:
        for phase in PHASES:
            if (section := trace.section(step, phase)) is not None:
                assert trace.digest(step, phase) is not None
                assert phase in trace.phases
                assert (section.words.keys(), section.norms.keys()) == (section.kinds.keys(),) * 2
                assert section.nonfinite.keys() <= section.words.keys()
                assert trace.words(step, phase) == [*section.values.words]
                found[step, phase] = section
            else:
                assert trace.digest(step, phase) is None
        if (call := trace.call(step)) is not None:
            found[step, "call"] = call
    return found


@contextmanager
def room() -> Iterator[Path]:
    """A folder for one example of a property: pytest's own would be shared by all of them."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@contextmanager
def reading(data: bytes) -> Iterator[RankTrace]:
    """A trace of these bytes."""
    with room() as folder:
        path = folder / "rank-00000.jsonl"
        path.write_bytes(data)
        with RankTrace(path) as trace:
            yield trace
