"""Files for contributors and hosts of the repository: valid, and true about commands and versions."""

from typing import Any

import yaml

import legacy_ddp
from tests.helpers.paths import ROOT


def _yaml(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


def test_the_citation_is_of_this_version() -> None:
    citation = _yaml("CITATION.cff")

    assert citation["version"] == legacy_ddp.__version__
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_the_workflow_runs_the_script_of_ci() -> None:
    (job,) = _yaml(".github/workflows/ci.yml")["jobs"].values()

    assert [step["run"] for step in job["steps"] if "run" in step][-1] == "bash .ci/run"
    assert (ROOT / ".ci" / "run").exists()


def test_the_template_of_an_issue_asks_for_the_page_of_a_report() -> None:
    template = _yaml(".github/ISSUE_TEMPLATE/bug.yml")

    assert {"name", "description", "body"} <= template.keys()
    assert any("legacy-ddp report" in field["attributes"]["label"] for field in template["body"])
    assert len({field["id"] for field in template["body"]}) == len(template["body"])
