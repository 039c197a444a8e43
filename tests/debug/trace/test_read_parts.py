"""Names of sections, first non-finite section and first steps, read without parsing the whole file."""

from pathlib import Path

from legacy_ddp.debug._trace.run import open_run
from tests.helpers.traces import KIND, NAMES, write_trace


def test_names_of_a_section_are_reported_without_its_values(tmp_path: Path) -> None:
    with open_run(write_trace(tmp_path / "t")).open(1) as trace:
        names = trace.names(3, "optimizer")

        assert names is not None
        assert (names.phase, names.names, names.kinds) == ("optimizer", NAMES["optimizer"], (KIND, KIND))
        assert trace.names(0, "optimizer") is None
        assert trace.names(99, "optimizer") is None


def test_the_first_section_with_elements_that_are_not_finite_is_known(tmp_path: Path) -> None:
    planted = {
        (0, 4, "local_gradients", "gradient of 'a'"): ("ab" * 8, 1.0, 1),
        (0, 3, "parameters", "parameter 'b'"): ("ab" * 8, 1.0, 2),
    }
    run = open_run(write_trace(tmp_path / "t", planted=planted))

    with run.open(0) as bad, run.open(1) as good:
        assert (bad.nonfinite, good.nonfinite) == ((3, "parameters"), None)


def test_reading_up_to_a_step_stops_at_the_next_one(tmp_path: Path) -> None:
    read = []
    run = open_run(write_trace(tmp_path / "t", steps=50))

    with run.open(0, read.append, until=3) as trace:
        assert list(trace.steps) == [0, 1, 2, 3, 4]
        assert trace.names(3, "buffers") is not None
        assert (trace.damage, trace.end) == ("", "")
        assert sum(read) < trace.size_bytes / 5
