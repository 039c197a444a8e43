"""The outcomes of torch DDP: judged by hand-made reports, measured in a short run, and told by both tables alike."""

import json
import re
from typing import Any

import _ddp_scenes as scenes
import pytest
import torch_ddp_faults as faults

from tests.helpers.paths import ROOT

KEPT = ROOT / "benchmarks" / "results" / "torch_ddp_faults.json"
PAGES = {page: (ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/comparison.md")}
# Rows about tools that torch DDP does not come with: nothing to run.
WITHOUT_OUTCOME = {
    "do two runs compute the same?",
    "do two runs compute the same, and if not, where do they part?",
    "measured values of a step",
    "measured values of a call",
}
ERROR = faults.Error(12.5, "RuntimeError: lost", "")


def _seen(*values: float, **named: list[float]) -> Any:
    return scenes.Seen(values, named)


@pytest.mark.parametrize(
    "reports,signals,words",
    [
        ([_seen(1.0, right=[1.0]), _seen(1.0, right=[1.0])], [0, 0], "works"),
        ([_seen(1.0, right=[2.0], mixed=[1.0]), _seen(1.0)], [0, 0], "silent, mixed"),
        ([_seen(1.0, right=[2.0]), _seen(1.0)], [0, 0], "silent, wrong values, equal on all ranks"),
        ([_seen(1.0, right=[1.0]), _seen(1.5)], [0, 0], "silent, the ranks differ"),
        ([_seen(float("nan"), right=[1.0]), _seen(float("nan"))], [0, 0], "silent, NaN on all ranks"),
        ([ERROR, _seen(1.0)], [0, 0], "error at once"),
        ([faults.Error(40.0, "", ""), ERROR], [0, 0], "error at once"),
        ([faults.Error(40.0, "", ""), _seen(1.0)], [0, 0], "error after 28 s"),
        ([faults.Error(12.5, "", "when wrapped"), None], [0, 0], "error when wrapped"),
        ([None, ERROR], [6, 0], "abort by SIGABRT"),
        ([None, _seen(1.0)], [0, 0], "the other ranks wait"),
        ([None], [0], "the other ranks wait"),
    ],
)
def test_an_outcome_is_judged_by_all_ranks(reports: list[Any], signals: list[int], words: str) -> None:
    assert faults.judge(reports, signals, begin=12.0).words == words


def test_the_kept_results_have_every_situation_and_their_words() -> None:
    results = json.loads(KEPT.read_text(encoding="utf-8"))["results"]

    assert {row: list(found["situations"]) for row, found in results.items()} == {
        row: [scene.label for scene in scenes.SCENES if scene.row == row] for row in faults.ROWS
    }
    for found in results.values():
        outcomes = {
            label: faults.Outcome(*(own[name] for name in ("kind", "detail", "seconds", "when")))
            for label, own in found["situations"].items()
        }
        assert found["cell"] == faults.cell(outcomes)


@pytest.mark.parametrize("page", PAGES)
def test_every_cell_about_torch_ddp_is_written_from_what_it_was_seen_to_do(page: str) -> None:
    table = re.search(r"^\| situation \| torch DDP \|.*\n\|[-|]+\n((?:\|.*\n)+)", PAGES[page], re.MULTILINE)
    assert table
    rows = {cells[1].strip(): cells[2].strip() for cells in (line.split("|") for line in table[1].splitlines())}

    assert len(rows) >= 9
    without = {situation for situation, cell in rows.items() if "<!-- figure: torch DDP, " not in cell}
    assert without <= WITHOUT_OUTCOME
