"""The recipes of docs/logging.md for trackers, run with the trackers themselves on two ranks."""

import json
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import python_blocks
from tests.helpers.scripts import fork_ranks

_TRACKERS = ("tensorboard", "wandb", "opentelemetry", "prometheus_client")
_MISSING = [name for name in _TRACKERS if find_spec(name) is None]
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(_MISSING), reason="needs the extra legacy_ddp[trackers]")]

_LOOP = """
import json, warnings
import torch
import torch.distributed as dist
from legacy_ddp import LegacyDistributedDataParallel
{before}
dist.init_process_group("gloo")
model = LegacyDistributedDataParallel(torch.nn.Linear(3, 1))
{recipe}
for _ in range(20):
    model(torch.ones(1, 3)).sum().backward()
    returned = model.all_reduce()
    model.zero_grad()
if dist.get_rank() == 0:
    facts = returned.as_dict()
{after}
dist.destroy_process_group()
"""


def _recipe(module: str) -> str:
    """The recipe that imports ``module``."""
    (found,) = [
        recipe
        for recipe in python_blocks("docs/logging.md")
        if f"from {module} " in recipe or f"import {module}\n" in recipe
    ]
    return found


def _followed(folder: Path, module: str, after: str, before: str = "", **environment: str) -> tuple[Any, Any]:
    """The record of the last call, and what the tracker of rank 0 has: ``seen`` of the code ``after``."""
    last = textwrap.indent(textwrap.dedent(after) + "\nprint(json.dumps([facts, seen]))", "    ")
    (folder / "train.py").write_text(_LOOP.format(before=before, recipe=_recipe(module), after=last))
    run = fork_ranks(2, "train.py", cwd=folder, environment=environment)
    assert run.returncode == 0, run.stderr
    facts, seen = json.loads([line for line in run.stdout.splitlines() if line.startswith("[{")][-1])
    return facts, seen


def test_tensorboard_has_norms_and_waits_of_both_ranks_and_seconds_of_phases(tmp_path: Path) -> None:
    after = """
        writer.close()
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        events = EventAccumulator("runs").Reload()
        names = events.Tags()["scalars"]
        seen = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in names}
    """
    facts, seen = _followed(tmp_path, "torch.utils.tensorboard", after, before='warnings.simplefilter("ignore")')

    waits = {f"seconds waited/rank {row['rank']}": row["seconds_waited"] for row in facts["rows"]}
    norms = {f"norm/rank {row['rank']}": row["local_norm"] for row in facts["rows"]}
    expected = {**waits, **norms, **{f"seconds/{phase}": value for phase, value in facts["seconds"].items()}}
    assert {name: values[-1] for name, values in seen.items()} == {
        name: [20, pytest.approx(value)] for name, value in expected.items()
    }
    assert {len(values) for values in seen.values()} == {2}  # calls 10 and 20


@pytest.mark.thorough
def test_weights_and_biases_has_the_same_without_a_network(tmp_path: Path) -> None:
    after = """
        seen = {key: value for key, value in dict(run.summary).items() if key[0] != "_"}
        run.finish()
    """
    facts, seen = _followed(
        tmp_path, "wandb", after, WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=str(tmp_path)
    )

    norms = {f"norm/rank {row['rank']}": row["local_norm"] for row in facts["rows"]}
    assert seen == {"call": 20, **norms, **{f"seconds/{phase}": value for phase, value in facts["seconds"].items()}}
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_opentelemetry_has_histograms_by_phase_and_rank_and_the_bytes(tmp_path: Path) -> None:
    before = """
from opentelemetry.sdk.metrics.export import ConsoleMetricExporter, MetricExportResult
kept = []
ConsoleMetricExporter.export = lambda _, data, *__, **___: kept.append(data) or MetricExportResult.SUCCESS
"""
    after = """
        reader.force_flush()
        (scope,) = kept[-1].resource_metrics[0].scope_metrics
        points = [(metric.name, point) for metric in scope.metrics for point in metric.data.data_points]
        seen = [[name, dict(point.attributes), getattr(point, "count", None) or point.value] for name, point in points]
    """
    facts, seen = _followed(tmp_path, "opentelemetry.sdk.metrics", after, before)

    by_phase = [["legacy_ddp.phase", {"phase": phase}, 20] for phase in facts["seconds"]]
    by_rank = [["legacy_ddp.waited", {"rank": rank}, 20] for rank in (0, 1)]
    assert seen == [*by_phase, *by_rank, ["legacy_ddp.payload", {}, 20 * facts["payload_bytes"]]]


def test_prometheus_reads_calls_bytes_and_seconds_from_the_file(tmp_path: Path) -> None:
    after = """
        from prometheus_client.parser import text_string_to_metric_families
        families = text_string_to_metric_families(open("legacy_ddp.prom").read())
        seen = [[s.name, s.labels, s.value] for family in families for s in family.samples]
    """
    facts, seen = _followed(tmp_path, "prometheus_client", after)

    values = {(name, *labels.values()): value for name, labels, value in seen if not name.endswith("_created")}
    phases = {("legacy_ddp_phase_seconds", phase): value for phase, value in facts["seconds"].items()}
    waits = {("legacy_ddp_waited_seconds", str(row["rank"])): row["seconds_waited"] for row in facts["rows"]}
    counted = {("legacy_ddp_calls_total",): 20, ("legacy_ddp_payload_bytes_total",): 20 * facts["payload_bytes"]}
    assert values == pytest.approx({**counted, **phases, **waits})
