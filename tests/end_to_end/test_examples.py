"""Do the example scripts do what they say, started as a user starts them?"""

import contextlib
import importlib
import io
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.ranks import run_ranks
from tests.helpers.scripts import (
    EXAMPLES,
    LIMIT_SECONDS,
    ROOT,
    assert_same_bits,
    example,
    fork_torchrun,
    heed_ctrl_c,
    load,
)
from tests.helpers.traces import write_trace

STEPS = 4
SHORT_LM = ("--steps", str(STEPS), "--update-freq", "2", "--batch-size", "4", "--save-every", "2", "--held-out", "256")
DONE = re.compile(r"done: \d+\.\d{3} bits/byte \(bigram \d\.\d{3}\), (\d+) steps, (\d+) all_reduce calls, (.*)\n")

sys.path.append(str(EXAMPLES))  # the scripts find their neighbours because Python puts a script's folder there
_batches = importlib.import_module("_batches")
_checkpoint = importlib.import_module("_checkpoint")
_progress = importlib.import_module("_progress")
_ranks = importlib.import_module("_ranks")
_text = importlib.import_module("_text")
train_lm = importlib.import_module("train_lm")


def _checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Checkpoint folder and output of a short run on two ranks that nothing interrupted."""
    folder = tmp_path_factory.mktemp("undisturbed")
    result = fork_torchrun(2, "train_lm.py", *SHORT_LM, "--save", str(folder))
    assert result.returncode == 0, result.stderr
    return folder, result


def _killed_after_first_checkpoint(undisturbed: Path, folder: Path) -> Path:
    """What a run that died between steps 2 and 4 leaves behind."""
    folder.mkdir()
    shutil.copy(undisturbed / "step-00000002.pt", folder)
    return folder


def test_train_lm_says_one_line_on_stdout_and_progress_of_one_rank_on_stderr(undisturbed: Any) -> None:
    folder, result = undisturbed
    done = DONE.fullmatch(result.stdout)
    progress = [line for line in result.stderr.splitlines() if line.startswith("step ")]

    assert done is not None, result.stdout
    assert done.groups() == (str(STEPS), str(STEPS), "replicas identical")
    assert [int(line.split()[1]) for line in progress] == list(range(1, STEPS + 1))
    assert max(map(len, progress)) <= 80
    assert _checkpoints(folder) == ["step-00000002.pt", "step-00000004.pt"]


@pytest.mark.thorough
def test_a_rank_may_have_no_window_to_evaluate() -> None:
    result = example(2, "train_lm.py", "--steps", "1", "--batch-size", "4", "--held-out", "1")

    assert result.returncode == 0, result.stderr
    assert DONE.fullmatch(result.stdout)


def test_train_lm_resumes_to_the_same_bits(undisturbed: Any, tmp_path: Path) -> None:
    original, uninterrupted = undisturbed
    folder = _killed_after_first_checkpoint(original, tmp_path / "resumed")

    result = example(2, "train_lm.py", *SHORT_LM, "--save", str(folder), "--resume")

    assert result.returncode == 0, result.stderr
    assert result.stdout == uninterrupted.stdout
    assert [line.split()[1] for line in result.stderr.splitlines() if line.startswith("step ")] == ["3", "4"]
    before, after = load(original / "step-00000002.pt"), load(folder / "step-00000004.pt")
    assert_same_bits(after, load(original / "step-00000004.pt"))
    # The comparison means something: weights moved, and every rank has random numbers of its own.
    assert not torch.equal(before["model"]["logits.weight"], after["model"]["logits.weight"])
    first, second = after["random"]
    assert not torch.equal(first["cpu"], second["cpu"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk that is always full")
def test_a_full_disk_leaves_the_old_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    _checkpoint.save_checkpoint(tmp_path, 1, {"settings": {}, "weight": torch.ones(3)})
    (tmp_path / "step-00000002.tmp").symlink_to("/dev/full")

    with pytest.raises(OSError, match="No space left"):
        _checkpoint.save_checkpoint(tmp_path, 2, {"settings": {}, "weight": torch.zeros(1_000_000)})

    assert _checkpoints(tmp_path) == ["step-00000001.pt"]
    assert _checkpoint.load_checkpoint(tmp_path, {})["weight"].tolist() == [1, 1, 1]


def test_a_resume_with_other_settings_is_refused_by_rank_0_alone(undisturbed: Any) -> None:
    folder, _ = undisturbed
    before = _checkpoints(folder)

    result = example(2, "train_lm.py", "--update-freq", "3", "--batch-size", "4", "--save", str(folder), "--resume")

    errors = [line for line in result.stderr.splitlines() if line.startswith("train_lm.py: error:")]
    assert result.returncode != 0
    assert len(errors) == 1, result.stderr
    assert re.search(r"--update-freq is not that of .*step-00000004\.pt: got 3, expected 2; resume with", errors[0])
    assert (result.stdout, _checkpoints(folder)) == ("", before)


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--keep", "1"], "argument --keep: got '1', expected a whole number of at least 2"),
        (["--update-freq", "-1"], "argument --update-freq: got '-1', expected a whole number of at least 1"),
        (["--lr", "nan"], "argument --lr: got 'nan', expected a finite number above 0"),
        (["--batch-size", "1000000"], "global batch is larger than the text: got 4000000 windows"),
        (["--resume"], "--resume has no folder: got no --save, expected --save DIR"),
        (["--resume", "--save", "{empty}"], "has nothing to resume: got no step-*.pt, expected one"),
        (["--operations", "2"], "--operations has no folder: got no --record, expected --record DIR"),
        (["--record", "{traced}"], "--record folder is in use: got a trace in {traced}, expected none"),
        (["--save", "{used}"], "--save folder is in use: got {used}/step-00000004.pt, expected no checkpoint"),
        (["--reproducible", "--update-freq", "2"], "--update-freq follows from --micro-batches and the number of"),
        (["--micro-batches", "4"], "--micro-batches is of use with --reproducible only"),
        (["--reproducible", "--micro-batches", "9999999"], "dataset_length is less than a step"),
        (["--save", "{used}", "--resume"], "world size is not that of {used}/step-00000004.pt: got 1, expected 2"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_end_in_one_line_before_any_process_group(
    undisturbed: Any,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {"empty": tmp_path, "used": undisturbed[0], "traced": tmp_path / "traced"}
    write_trace(places["traced"])
    monkeypatch.setattr(sys, "argv", ["train_lm.py", *(argument.format(**places) for argument in arguments)])

    with pytest.raises(SystemExit) as exit_info:
        train_lm.main()

    output = capsys.readouterr()
    assert exit_info.value.code == 2
    assert not dist.is_initialized()
    assert output.out == ""
    assert "train_lm.py: error:" in output.err.splitlines()[-1]
    assert message.format(**places) in output.err.splitlines()[-1]


@pytest.mark.thorough
def test_ctrl_c_ends_train_lm_without_a_traceback() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(EXAMPLES / "train_lm.py"), "--batch-size", "1", "--update-freq", "1"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, preexec_fn=heed_ctrl_c, **pipes) as run:
        time_limit = threading.Timer(LIMIT_SECONDS, run.kill)
        time_limit.start()
        assert run.stderr is not None
        first_line = run.stderr.readline()
        run.send_signal(signal.SIGINT)
        output, errors = run.communicate()
        time_limit.cancel()

    assert first_line.startswith("step ")
    assert run.returncode == 130, errors
    assert (output, "Traceback" in errors, errors.splitlines()[-1]) == ("", False, "interrupted")


def _leave(check: Callable[[], None]) -> tuple[int | str | None, str]:
    """The exit status of a check, and what it wrote to stderr."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            check()
    except SystemExit as leaving:
        return leaving.code, errors.getvalue()
    return 0, errors.getvalue()


def _replica_check(rank: int, guilty: int | None) -> tuple[int | str | None, str]:
    torch.manual_seed(rank)  # weights differ until they are broadcast
    module = nn.Linear(3, 2)
    for parameter in module.parameters():
        dist.broadcast(parameter.data, src=0)
    if rank == guilty:
        module.bias.data.view(torch.int32)[1] ^= 1  # the last bit of one weight
    return _leave(lambda: _ranks.require_identical_replicas(module))


def test_one_flipped_bit_ends_every_rank_and_rank_0_says_who_differs() -> None:
    assert run_ranks(_replica_check, 3, None) == [(0, "")] * 3  # of equal replicas nothing is said
    results = run_ranks(_replica_check, 3, 2)

    assert [code for code, _ in results] == [1, 1, 1]
    assert "replicas differ in 1 of 2 parameters" in results[0][1]
    assert "parameter 'bias', float32 (2,): rank 2 against ranks 0-1\n" in results[0][1]
    assert "one bit flipped: bit 0" in results[0][1]
    assert [text for _, text in results[1:]] == ["", ""]


def _settings_check(rank: int) -> tuple[int | str | None, str]:
    return _leave(lambda: _ranks.require_equal_settings({"--seed": 0, "text": "abc" if rank == 0 else "xyz"}))


def test_ranks_with_other_texts_end_together() -> None:
    results = run_ranks(_settings_check, 2)

    assert [code for code, _ in results] == [1, 1]
    assert "text differs between ranks: got ['abc', 'xyz'] on ranks 0 to 1, expected one" in results[0][1]


def test_bigram_costs_match_hand_arithmetic() -> None:
    bits = _text.bigram_bits(torch.tensor([*b"aaba"], dtype=torch.uint8), add=1)

    # After "a" (seen twice): "a" once, "b" once. After "b" (seen once): "a" once. Each of 256 bytes got one more.
    assert bits.shape == (256, 256)
    assert bits[ord("a"), ord("a")].item() == pytest.approx(-math.log2(2 / 258))
    assert bits[ord("a"), ord("z")].item() == pytest.approx(-math.log2(1 / 258))
    assert bits[ord("b"), ord("a")].item() == pytest.approx(-math.log2(2 / 257))
    assert bits[ord("z"), ord("a")].item() == pytest.approx(8)  # never seen: every byte is as likely
    windows = torch.tensor([[*b"ab"], [*b"ba"]], dtype=torch.uint8)
    assert _text.bigram_bits_per_byte(bits, windows) == pytest.approx(-math.log2(2 / 258 * 2 / 257) / 2)


def test_windows_make_each_byte_but_the_first_a_target_once() -> None:
    windows = _text.cut_windows(torch.arange(10, dtype=torch.uint8), 3)

    assert windows.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]


def test_the_text_holds_out_whole_files_and_reads_no_installed_package(tmp_path: Path) -> None:
    for index in range(40):
        (tmp_path / f"module_{index:02d}.py").write_bytes(bytes([index]) * 30_000)
    for folder in ("site-packages", "test", "json/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "left_out.py").write_bytes(b"\xff" * 30_000)

    text = _text.read_text(tmp_path)

    assert text.held_out.unique().tolist() == [0, 20]
    assert text.train.unique().tolist() == [index for index in range(40) if index not in (0, 20)]
    assert text.digest == _text.read_text(tmp_path).digest
    too_short = f"text in {re.escape(str(tmp_path / 'json'))} is too short: got 0 bytes in 0 .py"
    with pytest.raises(_text.TextError, match=too_short):
        _text.read_text(tmp_path / "json")


def test_an_epoch_reads_no_window_twice_and_depends_on_the_step_alone() -> None:
    windows = torch.arange(26)[:, None]
    steps = [_batches.global_batch(windows, step, 8, seed=0).flatten().tolist() for step in range(6)]

    assert all(len({*a, *b, *c}) == 24 for a, b, c in (steps[:3], steps[3:]))
    assert steps[:3] != steps[3:]  # the next epoch has another order
    assert _batches.global_batch(windows, 4, 8, seed=0).flatten().tolist() == steps[4]


def test_progress_without_tqdm_is_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)  # how Python marks a module that cannot be imported
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = _progress.Progress(0, 100, visible=True)
    for done in range(1, 101):
        progress.show(done, 2.5)
    progress.close()

    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "step    10 of 100   2.50 bits/byte"
    assert len(lines) == 10


@pytest.mark.parametrize(
    "script, missing, extras",
    [
        ("train_digits", "sklearn", "demo"),
        ("accelerate_digits", "accelerate", "accelerate,demo"),
        ("transformers_tiny", "transformers", "transformers"),
    ],
)
def test_without_a_library_an_example_names_the_command_that_installs_it(
    script: str, missing: str, extras: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.setattr(sys, "argv", [script])

    with pytest.raises(SystemExit) as leaving:
        importlib.import_module(script).main()

    told = f"{leaving.value}\n{capsys.readouterr().err}"
    assert f'{missing} is not installed; run: pip install "legacy_ddp[{extras}]"\n' in told


@pytest.mark.thorough
def test_train_digits_reaches_both_aims() -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

    result = example(2, "train_digits.py")

    assert result.returncode == 0, result.stderr
    accuracy, parity = result.stdout.splitlines()
    assert float(accuracy.removeprefix("accuracy ")) >= 0.97
    match = re.fullmatch(r"float64: 2 ranks x update-freq 4 equals 1 rank x update-freq 8 to (\d\.\de[+-]\d\d)", parity)
    assert match is not None, parity
    assert 0 < float(match[1]) <= 1e-12  # exactly 0 would mean that one model was compared with itself
