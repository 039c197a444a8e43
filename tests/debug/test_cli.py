"""Exit status, stdout and error line of the command, for any input."""

import configparser
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import legacy_ddp
from legacy_ddp.debug._cli import SILENT_BYTES, _tell_size, main
from legacy_ddp.debug._trace.records import RANK_FILE
from tests.helpers.paths import ROOT
from tests.helpers.scripts import fork_script
from tests.helpers.traces import end_after, environment, write_trace

_WITHOUT = "import sys; sys.modules[{!r}] = None; from legacy_ddp.debug._cli import main; sys.exit(main(sys.argv[1:]))"
_RANK_0, _RANK_1 = RANK_FILE.format(0), RANK_FILE.format(1)
DIFFERENT = {(1, 3, "parameters", "parameter 'a'"): ("ab" * 8, 2.0)}


def run(*arguments: object, start: tuple[str, ...] = ("-m", "legacy_ddp"), **options: Any) -> Any:
    """The command in a process of its own."""
    if start[0] == "-m" and not options:
        return fork_script(*start, *map(str, arguments))
    return subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        cwd=ROOT,
        text=True,
        timeout=120,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
    )


@pytest.fixture
def traces(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A, one equal to it, and one that differs."""
    return (
        write_trace(tmp_path / "a"),
        write_trace(tmp_path / "b"),
        write_trace(tmp_path / "c", planted=DIFFERENT),
    )


def test_the_exit_status_says_same_different_or_cannot_tell(
    traces: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = map(str, traces)
    later = write_trace(tmp_path / "later", environments=lambda rank, size: environment(rank, size, first_step=50))

    statuses = [main(["diff", *given]) for given in ([a, b], [a, c], [a, str(later)], [a], [c], [a, a])]

    assert statuses == [0, 1, 2, 0, 1, 0]
    captured = capsys.readouterr()
    assert captured.err == ""
    assert [
        line.split(":")[0] for line in captured.out.splitlines() if line.startswith(("same", "diff", "cannot"))
    ] == [
        "same",
        "different",
        "cannot tell",
        "same",
        "different",
        "same",
    ]


def test_a_rank_whose_file_ends_early_is_reported_by_status_text_json_and_page(
    traces: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bokeh")
    a, b, _ = traces
    end_after(b / _RANK_1, 2)

    assert [main(["diff", *map(str, given)]) for given in ([a, b], [b, a], [b])] == [2, 2, 2]
    assert "steps 3-5 were not compared on every rank" in " ".join(capsys.readouterr().out.split())
    assert main(["diff", str(a), str(b), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["steps"] == [0, 2]
    assert main(["report", str(a), str(b), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text()
    assert "? CANNOT TELL</b>steps 3-5 were not compared on every rank, because rank 1 of B ended before;" in page


def test_json_is_one_object_on_stdout(traces: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, _, c = map(str, traces)

    assert main(["diff", a, c, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["verdict"], found["first"]["step"]) == ("legacy_ddp diff", "different", 3)

    assert main(["show", a, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["world_size"], found["steps"]) == ("legacy_ddp show", 2, [0, 5])


def test_show_tells_what_is_in_a_trace(traces: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(traces[0])]) == 0
    assert "2 ranks, steps 0-5" in " ".join(capsys.readouterr().out.split())


def _missing(folder: Path) -> Path:
    return folder / "missing"


def _junk(folder: Path) -> Path:
    (folder / _RANK_0).write_bytes(bytes(range(256)) * 100)
    return folder


@pytest.mark.parametrize(
    "make, words",
    [
        (_missing, "cannot be read: No such file or directory; expected a recorder's folder"),
        (_junk, "rank-00000.jsonl is no trace"),
    ],
)
@pytest.mark.parametrize("command", ["diff", "show"])
def test_what_is_no_trace_is_one_line_of_error(
    command: str, make: Callable[[Path], Path], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(make(tmp_path))]) == 2

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("legacy-ddp: error: ")
    assert captured.err.count("\n") == 1
    assert words in captured.err


def test_other_models_are_one_line_of_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_trace(tmp_path / "a"), write_trace(tmp_path / "b\n\x1b", kind="float32 (9,)")

    assert main(["diff", str(a), str(b)]) == 2

    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "hold other parameters" in captured.err


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["diff"], ["show"], ["port"], ["diff", "a", "b", "c"], ["show", "a", "b"], ["port", "a", "b"], ["guess"]),
        *(["watch", "one"], ["watch", "1", "2"], ["watch", "--every", "0"], ["watch", "--every", "1", "--json"]),
    ],
)
def test_wrong_arguments_exit_with_2_and_name_themselves(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_every_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = re.findall(r"^    (\w+) ", _help(capsys), re.MULTILINE)

    assert commands == ["diff", "show", "report", "explain", "port", "watch"]
    for given in ([], *([command] for command in commands)):
        assert max(map(len, _help(capsys, *given).splitlines())) <= 80, given


def _help(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    return capsys.readouterr().out


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])

    assert caught.value.code == 0
    assert capsys.readouterr().out == f"legacy-ddp {legacy_ddp.__version__}\n"


def test_the_console_script_is_the_command() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")

    assert config["options.entry_points"]["console_scripts"].strip() == "legacy-ddp = legacy_ddp.debug._cli:main"


def test_a_process_says_different_by_its_exit_status(traces: tuple[Path, Path, Path]) -> None:
    done = run("diff", traces[0], traces[2])

    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("different: runs part at step 3 in parameters of rank 1: parameter 'a'\n")


def test_a_reader_that_closes_the_pipe_early_makes_no_noise(traces: tuple[Path, Path, Path]) -> None:
    reading_end, writing_end = os.pipe()
    os.close(reading_end)

    done = run("diff", traces[0], traces[2], stdout=writing_end)
    os.close(writing_end)

    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which is always full")
def test_output_that_cannot_be_written_is_one_line_of_error(traces: tuple[Path, Path, Path]) -> None:
    with open("/dev/full", "w") as full:
        done = run("show", traces[0], stdout=full)

    assert (done.returncode, done.stderr) == (2, "legacy-ddp: error: No space left on device\n")


def test_names_that_a_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    names = {"parameters": ("parameter 'größe'", "parameter 'b'")}
    planted = {(0, 1, "parameters", "parameter 'größe'"): ("ab" * 8, 1.0)}
    a, b = write_trace(tmp_path / "a", names=names), write_trace(tmp_path / "b", names=names, planted=planted)

    done = run("diff", a, b, env={**os.environ, "PYTHONIOENCODING": "ascii"})

    assert (done.returncode, done.stderr) == (1, "")
    assert "parameter 'gr\\xf6\\xdfe'" in done.stdout


class _Interrupted(io.StringIO):
    def write(self, _: str) -> int:
        raise KeyboardInterrupt


def test_ctrl_c_is_one_line_and_130(traces: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    with redirect_stdout(_Interrupted()):
        status = main(["show", str(traces[0])])

    assert (status, capsys.readouterr().err) == (130, "legacy-ddp: interrupted\n")


def test_a_fault_of_its_own_is_no_verdict(traces: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    class Broken(io.StringIO):
        def write(self, _: str) -> int:
            raise LookupError("unforeseen")

    with redirect_stdout(Broken()):
        status = main(["diff", str(traces[0]), str(traces[0])])

    assert status == 2
    assert "LookupError: unforeseen" in capsys.readouterr().err


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("size_bytes, said", [(380_000_000, "reading 380 MB ...\n"), (SILENT_BYTES - 1, "")])
def test_a_long_read_is_announced_on_a_terminal(size_bytes: int, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    _tell_size([SimpleNamespace(size_bytes=size_bytes)])

    assert terminal.getvalue() == said


@pytest.mark.parametrize(
    "arguments, status",
    [
        (["--help"], 0),
        (["--version"], 0),
        (["explain", "LayoutError"], 0),
        (["port", "benchmarks/_ddp_scenes.py"], 2),
        (["show", "{0}"], 0),
        (["diff", "{0}", "{1}"], 1),
        (["diff"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_the_command_starts_without_torch(traces: tuple[Path, Path, Path], arguments: list[str], status: int) -> None:
    given = [argument.format(traces[0], traces[2]) for argument in arguments]

    done = run(*given, start=("-c", _WITHOUT.format("torch")))

    assert (done.returncode, "Traceback" in done.stderr) == (status, False)


def test_without_bokeh_report_says_what_to_install(traces: tuple[Path, Path, Path], tmp_path: Path) -> None:
    done = run("report", traces[0], "-o", tmp_path / "page.html", start=("-c", _WITHOUT.format("bokeh")))

    assert done.returncode == 2
    assert done.stderr == ("legacy-ddp: error: report needs bokeh, which is not installed; pip install bokeh\n")


def test_a_home_directory_is_found_in_every_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bokeh")
    monkeypatch.setenv("HOME", str(tmp_path))
    write_trace(tmp_path / "a")
    write_trace(tmp_path / "b")

    assert main(["diff", "~/a", "~/b"]) == 0
    assert main(["show", "~/a"]) == 0
    assert main(["report", "~/a", "--output=~/page.html"]) == 0
    assert (tmp_path / "page.html").exists()
    assert capsys.readouterr().err == f"wrote {tmp_path / 'page.html'}\n"


def test_a_home_directory_that_is_not_known_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["show", "~nobody-of-that-name/a"])

    assert caught.value.code == 2
    assert "no home directory is known for '~nobody-of-that-name/a'; name the whole path" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["diff", ""], ["diff", "a", ""], ["show", ""], ["report", "a", "-o", ""]])
def test_an_empty_path_is_not_the_current_folder(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert "a path is empty, expected a name; the current folder is ." in capsys.readouterr().err


def test_report_writes_a_page_and_says_where(
    traces: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("bokeh")
    page = tmp_path / "page.html"

    assert main(["report", str(traces[0]), str(traces[2]), "-o", str(page)]) == 0

    assert page.stat().st_size > 0
    assert capsys.readouterr() == ("", f"wrote {page}\n")
