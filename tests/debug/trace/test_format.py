"""The statements of docs/trace-format.md hold for recorded traces."""

import re
from pathlib import Path

import pytest

from legacy_ddp.debug import Recorder
from legacy_ddp.debug._trace.line_format import PHASES
from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.run import open_run
from tests.helpers.paths import ROOT
from tests.helpers.small_models import add_gradients, wrap
from tests.helpers.traces import sealed

PAGE = (ROOT / "docs/trace-format.md").read_text(encoding="utf-8")


def test_the_example_on_the_page_is_a_trace(tmp_path: Path) -> None:
    lines = re.findall(r'^    (\{"line".*\})$', PAGE, re.MULTILINE)
    path = tmp_path / "rank-00000.jsonl"
    path.write_text("".join(f"{line}\n" for line in lines))

    with RankTrace(path) as trace:
        assert (list(trace.steps), trace.damage, trace.end) == ([0, 1], "", "closed")
        held, facts = trace.section(0, "parameters"), trace.call(1)
    assert held is not None
    assert held.words == {"parameter 'bias'": "19596ba07938b22e", "parameter 'weight'": "a63b651ba3671b14"}
    assert facts is not None
    assert facts.inputs == (("float32 (8, 10)", "0fe21a67b958d675"),)


def test_the_table_has_every_phase_in_order() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \| (?:in|at|as|after|likewise)", PAGE, re.MULTILINE)) == PHASES


@pytest.mark.usefixtures("alone")
def test_every_fact_is_on_the_page(tmp_path: Path) -> None:
    model = wrap()
    with Recorder(model, tmp_path):
        add_gradients(model, 1.0)
        model.all_reduce()

    (environment,) = open_run(tmp_path).environments
    assert [fact for fact in environment.facts if f"`{fact}`" not in PAGE] == []


def test_a_trace_of_version_1_is_read(tmp_path: Path) -> None:
    """The lines of version 1 on the page, as it was: calls without metrics, and no logged values."""
    lines = re.findall(r'^    (\{"line".*\})$', PAGE, re.MULTILINE)
    path = tmp_path / "rank-00000.jsonl"
    bodies = [line.partition(',"at":')[0] for line in lines if not line.startswith('{"line":"log"')]
    old = [re.sub(r',"metrics":\{[^}]*\}$', "", body).replace('"version":2', '"version":1') for body in bodies]
    assert old != bodies
    path.write_bytes(b"".join(sealed(body.encode(), at) for at, body in enumerate(old, start=1)))

    with RankTrace(path) as trace:
        assert (list(trace.steps), trace.damage, trace.end) == ([0, 1], "", "closed")
        assert trace.logged == {}
        facts = trace.call(1)
    assert facts is not None
    assert facts.metrics == {}
