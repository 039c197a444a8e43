"""The statements of docs/trace-format.md hold for recorded traces."""

import re
from pathlib import Path

import pytest

from legacy_ddp.debug import Recorder
from tests.helpers.command import command
from tests.helpers.paths import ROOT
from tests.helpers.recorded import PHASES, Recorded
from tests.helpers.small_models import add_gradients, wrap
from tests.helpers.traces import sealed

PAGE = (ROOT / "docs/trace-format.md").read_text(encoding="utf-8")


EXAMPLE = re.findall(r'^    (\{"line":"(\w+)".*\})$', PAGE, re.MULTILINE)


def _shown(folder: Path) -> str:
    """What ``legacy-ddp show`` says of a trace, in one line."""
    done = command("show", folder)
    assert (done.returncode, done.stderr) == (0, "")
    return " ".join(done.stdout.split())


def test_the_example_on_the_page_is_a_trace_and_the_page_says_how_to_read_it(tmp_path: Path) -> None:
    (tmp_path / "rank-00000.jsonl").write_text("".join(f"{line}\n" for line, _ in EXAMPLE))

    trace = Recorded(tmp_path)
    assert (trace.steps, trace.end) == ([0, 1], "closed")
    assert trace.words(0, "parameters") == {
        "parameter 'bias'": "19596ba07938b22e",
        "parameter 'weight'": "a63b651ba3671b14",
    }
    assert trace.calls[1].inputs == (("float32 (8, 10)", "0fe21a67b958d675"),)
    view, product = trace.operations[1]
    assert (view.name, product.name, product.module) == ("aten::t", "aten::addmm", "")
    assert product.parameters == ("bias", "", "weight")
    shown = _shown(tmp_path)
    for text in (
        "closed after step 1",
        "metric 'loss', sum over the ranks: 10.5 at step 1",
        "logged 'lr', rank 0: 0.001 at step 1",
        "operations of forward and backward: step 1 (2 a step and rank)",
    ):
        assert text in shown


def test_the_table_has_every_phase_in_order() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \| (?:in|at|as|after|likewise)", PAGE, re.MULTILINE)) == PHASES


@pytest.mark.usefixtures("alone")
def test_every_fact_is_on_the_page(tmp_path: Path) -> None:
    model = wrap()
    with Recorder(model, tmp_path):
        add_gradients(model, 1.0)
        model.all_reduce()

    facts = Recorded(tmp_path).environment.facts
    assert [fact for fact in facts if f"`{fact}`" not in PAGE] == []


def _write_version(version: int, kinds: set[str], folder: Path) -> str:
    """Write the lines on the page of these kinds as a file of another version has them, and show the trace."""
    bodies = [line.partition(',"at":')[0] for line, kind in EXAMPLE if kind in kinds]
    bodies = [body.replace('"version":4', f'"version":{version}') for body in bodies]
    old = [re.sub(r',"parts":\{[^}]*\}$', "", body) for body in bodies]
    assert old != bodies
    bodies = old
    if version == 1:
        old = [re.sub(r',"metrics":\{[^}]*\}$', "", body) for body in bodies]
        assert old != bodies
        bodies = old
    sealed_lines = (sealed(body.encode(), at) for at, body in enumerate(bodies, start=1))
    (folder / "rank-00000.jsonl").write_bytes(b"".join(sealed_lines))
    return _shown(folder)


def test_a_trace_of_version_3_is_read(tmp_path: Path) -> None:
    """Calls without the parts of a step."""
    kinds = {"environment", "names", "values", "call", "operation", "operations", "log", "end"}

    assert "operations of forward and backward: step 1 (2 a step and rank)" in _write_version(3, kinds, tmp_path)


def test_a_trace_of_version_2_is_read(tmp_path: Path) -> None:
    """Without operations."""
    shown = _write_version(2, {"environment", "names", "values", "call", "log", "end"}, tmp_path)

    assert "closed after step 1" in shown
    assert "logged 'lr', rank 0: 0.001 at step 1" in shown
    assert "operations" not in shown


def test_a_trace_of_version_1_is_read(tmp_path: Path) -> None:
    """Calls without metrics, and no logged values."""
    shown = _write_version(1, {"environment", "names", "values", "call", "end"}, tmp_path)

    assert "closed after step 1" in shown
    assert not any(word in shown for word in ("operations", "logged", "metric"))
