"""All benchmarks: a short run of each, their arguments, and the arithmetic of some. Nothing here looks at a time."""

import importlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import _checkout
import _scaling
import _warm_call_worker
import _ways
import bench_agree
import bench_digest
import bench_wire
import pytest
import run_all
import torch

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import fork_script, run_script

BENCHMARKS = ROOT / "benchmarks"
CALLS = ["bare all_reduce", "ours, off, views", "ours, off, to pack", "ours, info, views", "ours, info, to pack"]
IN_DEBUG = {"detail": 1.25, "check every 10 steps": 1.05}
SMALL = "1,000 small tensors"
OPERATIONS = ["plain", "plain again", "recorder", "with operations"]

# A script, its number of ranks (0: it starts its own), its arguments, and the outline of its results: names, values
# that do not depend on the machine, and None for all others. A list: all names, in their order.
RUNS: list[tuple[str, int, str, Any]] = [
    ("bench_agree", 2, "step --layers 1 --update-freq 1", {"step, update-freq 1, 2 ranks, zero_grad()": {"aim": 1.05}}),
    ("bench_agree", 4, "header --hosts 2", {"run": {"4": ["barrier", "all_gather", "tree", "agree()"]}, "aims": {}}),
    ("bench_all_reduce", 2, "--layers 1", ["call, transformer, 2 ranks", "parts, transformer, 2 ranks"]),
    ("bench_debug", 2, f"step --models '{SMALL}'", {f"step of {SMALL}, 2 ranks": {"aims": IN_DEBUG}}),
    ("bench_debug", 1, "digest --max-bytes 65536", {"4 KiB": ["copy", "digest"], "1,000 x 9 KiB": ["copy", "digest"]}),
    ("bench_digest", 2, "--layers 1", [f"step of {name}, 2 ranks" for name in ("train_lm", SMALL, "transformer")]),
    ("bench_operations", 1, "", {"step of train_lm, 1 ranks": {"variants": OPERATIONS, "operations": 3007}}),
    ("bench_scale", 2, "tensors --counts 1 3 --ddp-up-to 1", {"1 tensors": {"call": CALLS}, "3 tensors": None}),
    ("bench_scale", 2, "replan --counts 1", {"1 tensors": ["nothing changed", "one parameter frozen or thawed"]}),
    ("bench_scale", 2, "bytes --largest-mib 5", {size: {"call": CALLS} for size in ("1 MiB", "4 MiB")}),
    ("bench_scale", 4, "ranks --largest-mib 1", {"run, 1,000 tensors": None, "reasoned": {"ours": ["off", "info"]}}),
    ("bench_scale", 2, "control --simulated 16", {"processes": {"2": None}, "simulated": {"16": None}}),
    (
        "bench_step",
        2,
        "--models transformer --update-freq 1 --set-to-none yes --layers 1",
        {
            "step of transformer, update-freq 1, set_to_none=yes, 2 ranks": {
                "variants": list(_ways.WAYS),
                "aims": {"ours, off / torch DDP, bucket views": 0.82, "ours, info / ours, off": 1.05},
            }
        },
    ),
    ("_hosts_worker", 2, "--update-freq 2 --layers 1", ["distance_from_ddp", "link", "step, update-freq 2"]),
    ("bench_trace", 0, "--steps 12 --parameters 3 --repeats 1", {"12": ["equal", "different", "ranks of one"]}),
    ("bench_memory", 0, "--models small --steps 3 --repeats 1 --variants 'torch DDP'", ["small"]),
    ("bench_wire", 0, "--seeds 0 --wires 'their own' float16 --steps 1", ["their own", "float16"]),
    ("bench_watch", 0, "--repeats 1 --rounds 2", {"look_us": None, "columns": None}),
    ("torch_ddp_faults", 0, "--only nan --limit 10", {"nan": {"cell": "silent, NaN on all ranks"}}),
    ("bench_warm_call", 0, f"--repeats 1 --rounds 1 --steps 2 --warm-up 2 --against {ROOT}", {"ratio": None}),
]
LONG = ("bench_wire",)  # each of its trainings imports torch


def _assert_outline(found: Any, outline: Any) -> None:
    if isinstance(outline, list):
        assert list(found) == outline
    elif isinstance(outline, dict):
        for name, inner in outline.items():
            _assert_outline(found[name], inner)
    else:
        assert outline in (None, found)


def _run(rank: int, script: str, arguments: list[str]) -> None:
    bench = importlib.import_module(script)
    bench.run(bench.parse_arguments(arguments))


@pytest.mark.parametrize(
    "script, ranks, given, outline",
    [pytest.param(*run, marks=pytest.mark.soak) if run[0] in LONG else run for run in RUNS],
    ids=[f"{script} {given.partition(' -')[0]}" for script, _, given, _ in RUNS],
)
def test_a_short_run_writes_what_it_is_said_to_measure(
    script: str, ranks: int, given: str, outline: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "results.json"
    arguments = [*shlex.split(given), "--json", str(path)]
    if ranks:
        short = ("--repeats", "2", "--rounds", "1", "--warm-up", "1")
        run_ranks(_run, ranks, script, [*arguments, *short], timeout_seconds=120)
    else:
        run = fork_script(str(BENCHMARKS / f"{script}.py"), *arguments, forks_children=True)
        assert run.returncode == 0, run.stderr
    document = json.loads(path.read_text())

    _assert_outline(document["results"], outline)
    assert {"torch", "commit"} <= document["environment"].keys()


WRONG = {
    "bench_step": {
        "--models gpt": "invalid choice: 'gpt'",
        "--update-freq 1 0": "--update-freq is a count: got 0, expected 1 or more",
        "--repeats -2 --rounds -4": "--repeats and --rounds are counts: expected 1 or more",
        "--warm-up -1": "0 or more for --warm-up",
        "--repeats 1 --rounds 1": "too little to compare",
        "--json no/such/folder/step.json": "nowhere to go: got no/such/folder/step.json",
    },
    "bench_hosts": {"--rates fast": "argument --rates: got fast, expected 0.01 to 100 Gbit/s"},
    "bench_memory": {"--ranks 1": "too few --ranks: got 1, expected 2"},
    "bench_scale": {
        "tensors --counts 0": "--counts is out of range: got 0, expected 1 to 2,097,152",
        "bytes --largest-mib 0.5": "--largest-mib leaves nothing to measure: got 0.5",
        "ranks --alpha-us -1": "--alpha-us is out of range: got -1, expected more than 0",
    },
    "bench_trace": {"--steps 250 0": "--steps are too few to differ: got 0, expected 10 or more"},
    "bench_warm_call": {"--against docs": "no checkout: got docs, expected a folder with legacy_ddp/ in it"},
    "bench_wire": {"--wires bfloat16": "expected 'their own' among them"},
}


@pytest.mark.parametrize("script", WRONG)
def test_wrong_arguments_are_named(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    for given, said in WRONG[script].items():
        with pytest.raises(SystemExit) as caught:
            importlib.import_module(script).parse_arguments(given.split())

        assert caught.value.code == 2
        assert said in " ".join(capsys.readouterr().err.split()), given


@pytest.mark.parametrize("script", ["bench_hosts.py", "bench_step.py"])
def test_a_benchmark_started_as_a_script_finds_its_neighbours_and_its_own_package(script: str, tmp_path: Path) -> None:
    (tmp_path / "legacy_ddp.py").write_text("raise RuntimeError('the package of another checkout')")
    run = run_script(str(BENCHMARKS / script), "--help", cwd=tmp_path, environment={"PYTHONPATH": str(tmp_path)})

    assert (run.returncode, run.stderr) == (0, "")
    assert "--json" in run.stdout


@pytest.mark.parametrize(
    "size, per_host, hops, messages, down",
    [
        (2, 8, 2, 2, 1),  # a star of one host: up and down
        (8, 8, 2, 14, 7),
        (16, 8, 4, 7 + 1 + 1 + 7 + 7, 15),  # up 7 ranks, then a hub; down a hub and 7 ranks, then 7 ranks
        (33, 1, 2, 64, 32),  # the hosts of a single level
        (34, 1, 4, 66, 33),  # a hub below a hub
        (264, 8, 4, 7 + 32 + 32 + 7 + 7, 46),
    ],
)
def test_the_hubs_of_the_longest_way_send_to_the_ranks_below_one_after_the_other(
    size: int, per_host: int, hops: int, messages: int, down: int
) -> None:
    row = 128 + 56

    found = _scaling.tree(size, per_host)

    assert (found.hops, found.messages, found.messages_of_each * size) == (hops, messages, 2 * (size - 1))
    assert found.size_bytes == (size - 1) * row + down * size * row


def test_the_fitted_network_is_the_one_that_made_the_times() -> None:
    network = _scaling.Network(3e-5, 4e-6, 1e-9, turn_seconds=2e-4, cores=2)
    times = {size: network.seconds(_scaling.ring(size)) for size in (2, 4, 16, 64)}

    found = _scaling.fit_network(_scaling.ring, times, message_seconds=4e-6, beta_seconds=1e-9, cores=2)

    assert vars(found) == pytest.approx(vars(network))


@pytest.mark.parametrize("count,low,high", [(2, 0, 1), (5, 0, 4), (6, 0, 5), (10, 1, 8), (40, 13, 26)])
def test_the_interval_of_the_median_is_that_of_the_sign_test(count: int, low: int, high: int) -> None:
    # The tables' 95 % order statistics, counted from 0.
    assert bench_agree.median_interval(range(count)) == (low, high)


@pytest.mark.parametrize(
    "info,control,said",
    [
        ((0.99, 1.04), (0.98, 1.02), "met"),
        ((1.01, 1.06), (0.98, 1.02), "not decided"),
        ((1.06, 1.09), (0.98, 1.02), "missed"),
        ((1.06, 1.59), (0.77, 1.15), "not decided"),  # two equal variants differed as much
    ],
)
def test_an_aim_is_missed_only_beyond_what_two_equal_variants_differ_by(
    info: tuple[float, float], control: tuple[float, float], said: str
) -> None:
    assert bench_agree.verdict(info, control, 1.05) == said


def test_frames_files_and_changes_of_file_are_counted(tmp_path: Path) -> None:
    namespace: dict[str, object] = {}
    for name, text in {"b": "def inner(): pass", "a": "def outer():\n    inner()\n    own()\ndef own(): pass"}.items():
        exec(compile(text, f"{tmp_path}/{name}.py", "exec"), namespace)
    calls = _warm_call_worker.Calls(str(tmp_path))

    sys.setprofile(calls)
    namespace["outer"]()  # type: ignore[operator]
    sys.setprofile(None)

    assert calls.summary() == {"frames": 3, "files": 2, "changes of file": 2}  # a, b, a


def test_differences_are_taken_seed_by_seed() -> None:
    results = bench_wire.summarize({"their own": {"0": 2.0, "1": 3.0}, "bfloat16": {"0": 2.5, "1": 3.25}})

    assert results["their own"]["mean_difference"] == 0
    assert results["bfloat16"]["mean_difference"] == 0.375
    assert results["bfloat16"]["seed_spread"] == 0.75
    assert results["bfloat16"]["mean_bits"] == 2.875


@pytest.mark.usefixtures("alone")
def test_steps_without_digests_take_none_and_steps_with_digests_take_one() -> None:
    model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    digests = model._synchronizer.digests
    taken: list[int] = []
    take = digests._digest
    digests._digest = lambda number: (taken.append(number), take(number))[1]
    watch = bench_digest._Stopwatch(digests)

    for step in range(1, 9):
        watch.is_on = step in (2, 5, 6)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        model.all_reduce()
        optimizer.step()

    assert taken == [2, 5, 6]


def test_every_benchmark_is_among_them_and_every_kept_result_is_one_of_theirs() -> None:
    scripts = {path.name for path in BENCHMARKS.glob("bench_*.py")}
    assert {run.script for run in run_all.RUNS.values()} == {*scripts, "torch_ddp_faults.py"}

    kept = list(run_all.RESULTS.glob("*.json"))
    assert kept
    for path in kept:
        assert path.stem in run_all.RUNS
        pinned = "2.11.0" if path.stem.startswith("gpu") else "2.13.0"  # of the machine with a GPU
        assert json.loads(path.read_text())["environment"]["torch"].startswith(pinned)


def test_a_full_run_is_launched_on_its_ranks_and_writes_where_results_are_kept() -> None:
    words = run_all.command("step_4", full=True)

    assert words[words.index("--nproc-per-node") + 1] == "4"
    assert words[words.index("--json") + 1] == str(run_all.RESULTS / "step_4.json")
    assert "--json" not in run_all.command("step_2", full=False)
    assert "torch.distributed.run" not in run_all.command("memory", full=False)
    assert "sparse embedding" in run_all.command("step_others_2", full=True)
    short, full = (run_all.command("agree_header_64", full=full) for full in (False, True))
    assert [words[words.index("--nproc-per-node") + 1] for words in (short, full)] == ["8", "64"]


def test_a_failure_does_not_keep_others_from_running_and_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = {
        "fails": run_all.Run("bench_trace.py", 0, "", "--no-such-option"),
        "cannot": run_all.Run("bench_trace.py", 0, "", "", lambda: "it is Sunday"),
        "full only": run_all.Run("bench_trace.py", 0, ""),
        "works": run_all.Run("bench_trace.py", 0, "", "--help"),
    }
    monkeypatch.setattr(run_all, "RUNS", runs)

    with pytest.raises(SystemExit, match="failed: fails"):
        run_all.main([])

    said = capfd.readouterr().out
    assert "--- cannot: left out, it is Sunday" in said
    assert "--- works: " in said
    assert "exit code 0" in said
    assert "--- full only: left out, only in full (make bench-full BENCH=full only)" in said
    assert said.startswith("2 of 4 benchmarks will run\n")


def _git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


def test_a_commit_is_marked_if_what_is_measured_is_not_as_committed(tmp_path: Path) -> None:
    unmeasured = ("benchmarks/results/step.json", "README.md")
    for name in ("legacy_ddp/_core.py", "benchmarks/bench.py", *unmeasured):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before\n")
    _git(tmp_path, "init", "--quiet")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "--quiet", "--message", "all")
    commit = _git(tmp_path, "rev-parse", "HEAD")

    for name in unmeasured:
        (tmp_path / name).write_text("after\n")
    assert _checkout.commit(tmp_path) == commit
    for name in ("legacy_ddp/_core.py", "legacy_ddp/_new.py", "benchmarks/bench.py"):
        (tmp_path / name).write_text("after\n")
        assert _checkout.commit(tmp_path) == f"{commit}-dirty", name
        _git(tmp_path, "stash", "--quiet", "--include-untracked")
