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


@pytest.mark.parametrize(
    "version, lacking",
    [
        (3, set()),  # calls without the parts of a step
        (2, {"operation", "operations"}),
        (1, {"operation", "operations", "log"}),  # and calls without metrics
    ],
)
def test_a_trace_of_an_earlier_version_is_read(tmp_path: Path, version: int, lacking: set[str]) -> None:
    bodies = [line.partition(',"at":')[0] for line, kind in EXAMPLE if kind not in lacking]
    for member in ("parts", "metrics")[: 2 if version == 1 else 1]:
        old = [re.sub(rf',"{member}":\{{[^}}]*\}}$', "", body) for body in bodies]
        assert old != bodies
        bodies = old
    bodies[0] = bodies[0].replace('"version":4', f'"version":{version}')
    lines = (sealed(body.encode(), at) for at, body in enumerate(bodies, start=1))
    (tmp_path / "rank-00000.jsonl").write_bytes(b"".join(lines))

    shown = _shown(tmp_path)

    assert "closed after step 1" in shown
    assert ("operations of forward and backward: step 1 (2 a step and rank)" in shown) == (version == 3)
    assert ("logged 'lr', rank 0: 0.001 at step 1" in shown) == (version > 1)
    assert [word in shown for word in ("operations", "logged", "metric")] == [version > 2, version > 1, version > 1]
