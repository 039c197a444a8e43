"""The statements of docs/trace-format.md hold for recorded traces."""

import re
from pathlib import Path

import pytest

from legacy_ddp.debug import Recorder
from legacy_ddp.debug._trace.read import RankTrace
from legacy_ddp.debug._trace.records import PHASES
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


def test_the_example_on_the_page_has_operations(tmp_path: Path) -> None:
    path = tmp_path / "rank-00000.jsonl"
    path.write_text("".join(f"{line}\n" for line in re.findall(r'^    (\{"line".*\})$', PAGE, re.MULTILINE)))

    with RankTrace(path) as trace:
        view, product = trace.operations(1)
    assert (view.name, product.name, product.module) == ("aten::t", "aten::addmm", "")
    assert product.parameters == ("bias", "", "weight")


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


def _lines_of_version(version: int, kinds: set[str]) -> list[str]:
    """The lines on the page of these kinds, without their ends, as a file of another version has them."""
    lines = re.findall(r'^    (\{"line":"(\w+)".*\})$', PAGE, re.MULTILINE)
    bodies = [line.partition(',"at":')[0] for line, kind in lines if kind in kinds]
    return [body.replace('"version":3', f'"version":{version}') for body in bodies]


def test_a_trace_of_version_2_is_read(tmp_path: Path) -> None:
    """Without operations."""
    path = tmp_path / "rank-00000.jsonl"
    bodies = _lines_of_version(2, {"environment", "names", "values", "call", "log", "end"})
    path.write_bytes(b"".join(sealed(body.encode(), at) for at, body in enumerate(bodies, start=1)))

    with RankTrace(path) as trace:
        assert (list(trace.steps), trace.damage, trace.end) == ([0, 1], "", "closed")
        assert trace.logged == {1: {"lr": 0.001}}
        assert (trace.operations(1), trace.operation_counts) == ((), {})


def test_a_trace_of_version_1_is_read(tmp_path: Path) -> None:
    """Calls without metrics, and no logged values."""
    path = tmp_path / "rank-00000.jsonl"
    bodies = _lines_of_version(1, {"environment", "names", "values", "call", "end"})
    old = [re.sub(r',"metrics":\{[^}]*\}$', "", body) for body in bodies]
    assert old != bodies
    path.write_bytes(b"".join(sealed(body.encode(), at) for at, body in enumerate(old, start=1)))

    with RankTrace(path) as trace:
        assert (list(trace.steps), trace.damage, trace.end) == ([0, 1], "", "closed")
        assert trace.logged == {}
        facts = trace.call(1)
    assert facts is not None
    assert facts.metrics == {}
