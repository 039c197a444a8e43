"""Equal work of all variants of bench_hosts.py, and its verdicts. Nothing here looks at a time."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _hosts_worker as worker
import bench_hosts
import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import run_script

SHORT = ("--layers", "1", "--repeats", "1", "--rounds", "2", "--warm-up", "0")


def _refused(rank: int) -> list[str]:
    texts = []
    for name, wrap in WRONG:
        with pytest.raises(RuntimeError) as caught:
            worker.check_synchronization(1, {"torch DDP": worker.VARIANTS["torch DDP"], name: wrap})
        texts.append(str(caught.value))
    return texts


def _in_bf16(module: nn.Module) -> nn.Module:
    return LegacyDistributedDataParallel(module, reduce_dtype=torch.bfloat16, transport="gloo")  # memory rounds less


WRONG = [
    ("ours, off", lambda module: module),
    ("ours, off, reduce_dtype=bf16", lambda module: module),
    ("ours, off", _in_bf16),
    ("local compute alone", LegacyDistributedDataParallel),
]


def test_a_variant_that_does_other_work_than_its_name_says_is_refused() -> None:
    for texts in run_ranks(_refused, 2):
        for (name, _), text in zip(WRONG, texts, strict=True):
            assert f"a step of '{name}' is off that of torch DDP" in text


def _goodput(rank: int) -> dict[str, float]:
    arguments = worker.parse_arguments([*SHORT])
    return {name: row["gigabits_per_second"] * row["median_ms"] for name, row in worker.measure_link(arguments).items()}


def test_a_rate_counts_the_bits_that_a_rank_has_to_send() -> None:
    # An embedding of 3,328 x 256; a layer of 4 x 256 in- and 256 out-projections, 2 x 4 x 256 in its feed-forward, all
    # times 256, with 4 + 4 + 1 times 256 biases and two norms; a last norm.
    numel = 3328 * 256 + 12 * 256**2 + (4 + 4 + 1 + 4) * 256 + 2 * 256

    for found in run_ranks(_goodput, 3):
        ring = 2 * 2 / 3
        assert found["bare all_reduce"] == pytest.approx(ring * 32 * numel / 1e6)
        assert found["bare all_reduce, bf16"] == pytest.approx(ring * 16 * numel / 1e6)
        assert found["send, rank 0 to 1"] == pytest.approx(32 * numel / 1e6)


def _table(**intervals: tuple[float, float, float]) -> dict[str, Any]:
    """Least, median, greatest of each comparison; those left out are 1."""
    rows = dict.fromkeys(worker.COMPARED, (1.0, 1.0, 1.0)) | intervals
    compared = {
        what: {"median_ratio": median, "ratio_interval": [low, high]} for what, (low, median, high) in rows.items()
    }
    return {"variants": {}, "compared": compared}


def _results(**tables: Mapping[str, Any]) -> dict[str, Any]:
    return {f"step, update-freq {name.removeprefix('at_')}": table for name, table in tables.items()}


def test_a_summary_names_the_update_freq_from_which_on_it_costs_nothing() -> None:
    results = _results(
        at_16=_table(off=(0.90, 0.95, 0.98), info=(0.98, 1.01, 1.03), bf16=(0.7, 0.8, 0.9)),
        at_1=_table(off=(0.90, 0.95, 0.98), info=(0.90, 0.95, 0.98), bf16=(0.7, 0.8, 0.9)),
        at_4=_table(off=(1.10, 1.20, 1.30), info=(0.90, 0.95, 0.98), bf16=(0.7, 0.8, 0.9)),
        at_8=_table(off=(0.98, 0.99, 1.02), info=(0.90, 0.95, 0.98), bf16=(0.7, 0.8, 0.9)),
    )

    summary = bench_hosts.summarize_rate(results)

    assert list(summary) == list(worker.COMPARED)
    assert list(summary["off"]["median_ratios"].items()) == [("1", 0.95), ("4", 1.2), ("8", 0.99), ("16", 0.95)]
    found = {what: (row["from_update_freq"], row["from_update_freq_surely"]) for what, row in summary.items()}
    assert found == {
        "control": (1, 1),
        "off": (8, 16),
        "info": (None, None),  # it is again above at the last
        "gloo": (1, 1),
        "bf16": (1, 1),
        "bf16, both": (1, 1),
    }


def test_aims_are_judged_from_update_freq_8_on_and_moved_by_what_two_equal_variants_surely_differ_by() -> None:
    results = _results(
        at_4=_table(),
        at_8=_table(off=(0.9, 0.95, 1.0), info=(0.99, 1.0, 1.01), bf16=(0.76, 0.8, 0.85)),
        at_16=_table(control=(0.7, 0.8, 0.9), off=(0.9, 0.95, 1.0), info=(1.1, 1.2, 1.3), bf16=(0.6, 0.65, 0.675)),
        at_32=_table(control=(1.1, 1.15, 1.2), off=(1.11, 1.15, 1.25), info=(1.05, 1.1, 1.2), bf16=(0.76, 0.78, 0.8)),
    )

    judged = bench_hosts.judge_aims(results, bench_hosts.ONE_RANK_AIMS)

    said = {name: {what: (row["aim"], row["verdict"]) for what, row in rows.items()} for name, rows in judged.items()}
    assert said == {
        "update-freq 8": {"off": (1.0, "met"), "info": (1.0, "not decided"), "bf16": (0.75, "missed")},
        "update-freq 16": {"off": (1.0, "not decided"), "info": (1.0, "missed"), "bf16": (0.75, "met")},
        "update-freq 32": {"off": (1.0, "missed"), "info": (1.0, "not decided"), "bf16": (0.75, "not decided")},
    }


@pytest.mark.hosts
@pytest.mark.slow
def test_two_hosts_are_measured_and_judged(tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    script = str(ROOT / "benchmarks" / "bench_hosts.py")

    run = run_script(script, "--rates", "2", "--update-freq", "8", *SHORT, "--json", str(path))
    document = json.loads(path.read_text())
    results = document["results"]

    assert (run.returncode, run.stderr) == (0, "")
    assert max(map(len, run.stdout.splitlines())) <= 80
    assert document["environment"]["world_size"] == 2
    assert document["arguments"]["rates"] == [2.0]
    assert list(results["rates"]) == list(results["summary"]) == ["2 Gbit/s"]
    for rate in results["rates"].values():
        assert list(rate["step, update-freq 8"]["variants"]) == list(worker.VARIANTS)
        assert rate["reached"]["share_of_rate"]["send, rank 0 to 1"] < 1.25  # what may leave at once is 8 % here
    assert list(results["aims"]) == ["update-freq 8"]
    assert list(results["aims"]["update-freq 8"]) == ["off", "info", "bf16"]
    assert "aim 0.75: " in run.stdout
