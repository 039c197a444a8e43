"""Exit status, stdout and error line of the command, for any input."""

import configparser
import io
import os
import re
from pathlib import Path

import pytest

import legacy_ddp
from tests.helpers.command import command, refusal
from tests.helpers.paths import ROOT
from tests.helpers.scripts import run_script
from tests.helpers.traces import end_after, write_trace

_WITHOUT = "import sys; sys.modules[{!r}] = None; from legacy_ddp.debug._cli import main; sys.exit(main(sys.argv[1:]))"
_RANK_1 = "rank-00001.jsonl"
DIFFERENT = {(1, 3, "parameters", "parameter 'a'"): ("ab" * 8, 2.0)}


@pytest.fixture
def traces(tmp_path: Path) -> tuple[Path, Path]:
    """Two that differ."""
    return write_trace(tmp_path / "a"), write_trace(tmp_path / "b", planted=DIFFERENT)


def test_an_error_is_one_line_whatever_the_name_of_the_folder(tmp_path: Path) -> None:
    told = refusal("diff", write_trace(tmp_path / "a"), write_trace(tmp_path / "b\n\x1b", kind="float32 (9,)"))

    assert "hold other parameters" in told


@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["diff"], ["show"], ["port"], ["diff", "a", "b", "c"], ["show", "a", "b"], ["port", "a", "b"], ["guess"]),
        *(["watch", "one"], ["watch", "1", "2"], ["watch", "--every", "0"], ["watch", "--every", "1", "--json"]),
    ],
)
def test_wrong_arguments_exit_with_2_and_name_themselves(arguments: list[str]) -> None:
    done = command(*arguments)

    assert done.returncode == 2
    assert "error: " in done.stderr


def test_every_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    commands = re.findall(r"^    (\w+) ", command("--help").stdout, re.MULTILINE)

    assert commands == ["diff", "show", "report", "explain", "port", "watch"]
    for given in ([], *([name] for name in commands)):
        done = command(*given, "--help")
        assert done.returncode == 0
        assert max(map(len, done.stdout.splitlines())) <= 80, given


def test_the_version_is_that_of_the_package() -> None:
    done = command("--version")

    assert (done.returncode, done.stdout) == (0, f"legacy-ddp {legacy_ddp.__version__}\n")


def test_the_console_script_is_the_command() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")

    assert config["options.entry_points"]["console_scripts"].strip() == "legacy-ddp = legacy_ddp.debug._cli:main"


def test_a_reader_that_closes_the_pipe_early_makes_no_noise(traces: tuple[Path, Path]) -> None:
    reading_end, writing_end = os.pipe()
    os.close(reading_end)

    done = run_script("-m", "legacy_ddp", "diff", *map(str, traces), stdout=writing_end)
    os.close(writing_end)

    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which is always full")
def test_output_that_cannot_be_written_is_one_line_of_error(traces: tuple[Path, Path]) -> None:
    with open("/dev/full", "w") as full:
        done = run_script("-m", "legacy_ddp", "show", str(traces[0]), stdout=full)

    assert (done.returncode, done.stderr) == (2, "legacy-ddp: error: No space left on device\n")


def test_names_that_a_terminal_cannot_show_are_escaped(tmp_path: Path) -> None:
    names = {"parameters": ("parameter 'größe'", "parameter 'b'")}
    planted = {(0, 1, "parameters", "parameter 'größe'"): ("ab" * 8, 1.0)}
    a, b = write_trace(tmp_path / "a", names=names), write_trace(tmp_path / "b", names=names, planted=planted)

    given = ("-m", "legacy_ddp", "diff", str(a), str(b))
    done = run_script(*given, environment={"PYTHONIOENCODING": "ascii"})

    assert (done.returncode, done.stderr) == (1, "")
    assert "parameter 'gr\\xf6\\xdfe'" in done.stdout


class _Broken(io.StringIO):
    """A file in which every write fails."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def write(self, _: str) -> int:
        raise self.error


def test_ctrl_c_is_one_line_and_130_and_a_fault_of_its_own_no_verdict(traces: tuple[Path, Path]) -> None:
    done = command("show", traces[0], output=_Broken(KeyboardInterrupt()))
    assert (done.returncode, done.stderr) == (130, "legacy-ddp: interrupted\n")

    done = command("diff", traces[0], traces[0], output=_Broken(LookupError("unforeseen")))
    assert done.returncode == 2
    assert "LookupError: unforeseen" in done.stderr


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("size_bytes, said", [(21_000_000, "reading 21 MB ...\n"), (19_000_000, "")])
def test_a_long_read_is_announced_on_a_terminal(traces: tuple[Path, Path], size_bytes: int, said: str) -> None:
    end_after(traces[0] / _RANK_1, None)
    os.truncate(traces[0] / _RANK_1, size_bytes)

    told = command("show", traces[0], errors=_Terminal()).stderr

    assert [line for line in told.splitlines(keepends=True) if line.startswith("reading")] == [said] * bool(said)


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
def test_the_command_starts_without_torch(traces: tuple[Path, Path], arguments: list[str], status: int) -> None:
    given = [argument.format(traces[0], traces[1]) for argument in arguments]

    done = run_script("-c", _WITHOUT.format("torch"), *given)

    assert (done.returncode, "Traceback" in done.stderr) == (status, False)


def test_without_bokeh_report_says_what_to_install(traces: tuple[Path, Path], tmp_path: Path) -> None:
    without = "; ".join(f"sys.modules[{name!r}] = None" for name in ("numpy", "jinja2"))  # bokeh brings them
    code = f"import sys; {without}; {_WITHOUT.format('bokeh')}"
    done = run_script("-c", code, "report", str(traces[0]), "-o", str(tmp_path / "page.html"))

    assert done.returncode == 2
    assert done.stderr == ("legacy-ddp: error: report needs bokeh, which is not installed; pip install bokeh\n")


def test_a_home_directory_is_found_in_every_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("bokeh")
    monkeypatch.setenv("HOME", str(tmp_path))
    write_trace(tmp_path / "a")
    write_trace(tmp_path / "b")

    given = (["diff", "~/a", "~/b"], ["show", "~/a"], ["report", "~/a", "--output=~/page.html"])
    found = [command(*arguments) for arguments in given]

    assert [done.returncode for done in found] == [0] * 3
    assert [done.stderr for done in found] == ["", "", f"wrote {tmp_path / 'page.html'}\n"]
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["show", "~nobody-there/a"], "no home directory is known for '~nobody-there/a'; name the whole path"),
        *(
            (arguments, "a path is empty, expected a name; the current folder is .")
            for arguments in (["diff", ""], ["diff", "a", ""], ["show", ""], ["report", "a", "-o", ""])
        ),
    ],
)
def test_a_path_that_names_no_place_is_reported(arguments: list[str], words: str) -> None:
    done = command(*arguments)

    assert done.returncode == 2
    assert words in done.stderr
