"""The log as a script sees it: lines by default, and the handlers of the script in their place."""

import json
import re
import textwrap
from pathlib import Path

import pytest

from tests.helpers.paths import python_blocks
from tests.helpers.scripts import fork_scripts

_TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"
_START = """
import logging, os, sys, warnings
import torch
import torch.distributed as dist
from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp._log import logger_of, warn

def wrap():
    store = "file://" + os.path.abspath("store")
    dist.init_process_group("gloo", init_method=store, rank=int(os.environ["RANK"]), world_size=2)
    return LegacyDistributedDataParallel(torch.nn.Linear(3, 1))
"""
_WRAP = "wrap(); dist.destroy_process_group()"
BY_LEVEL, BY_HANDLER, SILENCED, WITHOUT_WAITS = (
    recipe for recipe in python_blocks("docs/logging.md") if "import logging" in recipe
)


def _errors(folder: Path, code: str, ranks: int = 1, **environment: str) -> list[str]:
    """What scripts with this code write to stderr, on each rank."""
    (folder / "script.py").write_text(_START + textwrap.dedent(code))
    places = [{"RANK": str(rank), **environment} for rank in range(ranks)]
    runs = fork_scripts([("script.py",)] * ranks, places, cwd=folder)
    assert [run.returncode for run in runs] == [0] * ranks, [run.stderr for run in runs]
    return [run.stderr for run in runs]


def test_a_warning_is_a_line_with_time_level_name_and_rank(tmp_path: Path) -> None:
    code = """
        logger_of(3).warning("ranks have waited for %d s", 5)
        logger_of(2).warning("a report\\nof two lines")
        logger_of(3).info("not shown")
        logging.getLogger("legacy_ddp").warning("of other code")
    """
    (errors,) = _errors(tmp_path, code)

    lines = [
        "WARNING legacy_ddp rank 3: ranks have waited for 5 s",
        "WARNING legacy_ddp rank 2: a report\nof two lines",
        "WARNING legacy_ddp rank ?: of other code",
    ]
    assert re.fullmatch("".join(f"{_TIME} {re.escape(line)}\n" for line in lines), errors), errors


def test_the_recipe_with_a_level_shows_rank_0_alone(tmp_path: Path) -> None:
    first, second = _errors(tmp_path, BY_LEVEL + _WRAP, ranks=2)

    assert re.match(rf"{_TIME} INFO legacy_ddp rank 0: new wrapper: ", first), first
    assert second == ""


def test_the_recipe_with_a_handler_shows_every_rank_once_and_other_loggers(tmp_path: Path) -> None:
    level = 'logging.getLogger("legacy_ddp").setLevel("INFO")\nlogging.getLogger("other").warning("here")\n'

    for rank, errors in enumerate(_errors(tmp_path, BY_HANDLER + level + _WRAP, ranks=2)):
        assert errors.count("new wrapper") == 1
        assert re.search(rf"(?m)^{_TIME} INFO legacy_ddp rank {rank}: new wrapper: ", errors), errors
        assert re.search(rf"(?m)^{_TIME} WARNING other rank -: here$", errors), errors


@pytest.mark.parametrize(
    "handler, expected",
    [
        ('logging.basicConfig(format="own %(message)s")', "own text\n"),
        ('logging.getLogger("legacy_ddp").addHandler(logging.NullHandler())', ""),
        # the root has a handler, which gets no record
        (
            'logging.getLogger("legacy_ddp").propagate = False; logging.basicConfig()',
            rf"{_TIME} WARNING .* rank 1: text\n",
        ),
        ("logger_of(1); logging.basicConfig(format='own %(message)s')", "own text\n"),
    ],
)
def test_a_handler_that_gets_the_records_takes_the_place_of_the_lines(
    handler: str, expected: str, tmp_path: Path
) -> None:
    (errors,) = _errors(tmp_path, f'{handler}\nlogger_of(1).warning("text")\n')

    assert re.fullmatch(expected, errors), errors


_EVERYWHERE = """
def tell(rank):
    warn(rank, "of all ranks", "Uneven work", is_everywhere=True)
for rank in range(3):
    tell(rank)
"""


@pytest.mark.parametrize(
    "setup",
    [
        "",
        'warnings.filterwarnings("ignore")',
        'warnings.filterwarnings("error")',
        # disables every logger that exists, as its default is
        'logger_of(0); import logging.config; logging.config.dictConfig({"version": 1, "root": {"handlers": []}})',
    ],
)
def test_a_warning_of_all_ranks_is_one_record_of_rank_0_whatever_is_configured(setup: str, tmp_path: Path) -> None:
    (errors,) = _errors(tmp_path, f"{setup}\n{_EVERYWHERE}")

    place = re.escape("at script.py:") + r"\d+ in tell"
    command = "meaning and next step: legacy-ddp explain Uneven work"
    assert re.fullmatch(f"{_TIME} WARNING legacy_ddp rank 0: of all ranks\n{place}\n{command}\n", errors), errors


def test_the_recipe_with_a_filter_silences_one_kind_of_warnings(tmp_path: Path) -> None:
    (errors,) = _errors(tmp_path, f'{SILENCED}\n{_EVERYWHERE}\nwarn(0, "another", "Replicas differ")\n')

    assert "of all ranks" not in errors
    assert "WARNING legacy_ddp rank 0: another" in errors


def test_the_recipe_with_the_event_silences_waits_and_keeps_the_ends_of_ranks(tmp_path: Path) -> None:
    code = (
        'for event in ("waiting", "arrived", "lost"): logger_of(0).warning("told: %s", event, extra={"event": event})'
    )
    (errors,) = _errors(tmp_path, f"{WITHOUT_WAITS}\n{code}\n")

    assert re.fullmatch(f"{_TIME} WARNING legacy_ddp rank 0: told: lost\n", errors), errors


def test_the_default_lines_change_no_other_logger(tmp_path: Path) -> None:
    code = """
        root, level = logging.getLogger(), logging.getLogger().level
        assert logging.getLogger("legacy_ddp").handlers == []
        for rank in range(3):
            logger_of(rank)
        assert len(logging.getLogger("legacy_ddp").handlers) == 1
        assert (root.handlers, root.level, logging.getLogger("legacy_ddp").level) == ([], level, 0)
        sys.stderr = None
        logger_of(0).warning("nobody reads this")
    """
    assert _errors(tmp_path, code) == [""]


_CALLS = """
    model = wrap()
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        if dist.get_rank() == 1:
            model.module.weight.grad[0, 0] = float("nan")
        model.all_reduce()
        model.zero_grad()
    dist.destroy_process_group()
"""


def test_json_has_the_facts_of_calls_and_warnings_on_every_rank(tmp_path: Path) -> None:
    for rank, errors in enumerate(_errors(tmp_path, _CALLS, ranks=2, LEGACY_DDP_LOG="json, debug")):
        lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
        assert {(line["logger"], line["rank"]) for line in lines} == {("legacy_ddp", rank)}
        events = [(line["event"], line["level"]) for line in lines]
        call = ("call", "DEBUG")
        assert sorted(events) == sorted(
            [("construction", "INFO"), ("transport", "INFO"), ("warning", "DEBUG" if rank else "WARNING"), call, call]
        )
        first, second = (line for line in lines if line["event"] == "call")
        assert (first["call"], second["call"]) == ("all_reduce() call 1", "all_reduce() call 2")
        assert first["bytes"] == 4 * (3 + 1)
        assert {"plan", "pack", "agree", "payload", "alias"} <= set(first["seconds"])
        (warning,) = (line for line in lines if line["event"] == "warning")
        assert "rank 1" in str(warning["message"])


def test_every_record_has_every_attribute_for_a_handler_of_the_script(tmp_path: Path) -> None:
    code = """
        form = "%(event)s %(rank)s %(call)s %(phase)s %(seconds)s %(bytes)s %(ranks)s %(report)s"
        logging.basicConfig(format=form)
        logger_of(1).warning("text")
        logger_of(2).warning("text", extra={"event": "waiting", "ranks": [3], "seconds": 1.5})
    """
    assert _errors(tmp_path, code, LEGACY_DDP_LOG="json") == [
        "None 1 None None None None None None\nwaiting 2 None None 1.5 None [3] None\n"
    ]


@pytest.mark.parametrize(
    "variable, level, shown",
    [("", None, ""), ("info", None, "INFO"), ("text,debug", None, "INFO DEBUG"), ("debug", "ERROR", "")],
)
def test_the_variable_sets_the_level_unless_the_script_does(
    variable: str, level: str | None, shown: str, tmp_path: Path
) -> None:
    code = f"""
        if {level!r}:
            logging.getLogger("legacy_ddp").setLevel({level!r})
        logger_of(0).info("one")
        logger_of(0).debug("two")
    """
    (errors,) = _errors(tmp_path, code, LEGACY_DDP_LOG=variable)

    assert re.findall(rf"(?m)^{_TIME} (\w+) legacy_ddp rank 0", errors) == shown.split()


def test_json_of_an_exception_is_one_line(tmp_path: Path) -> None:
    code = """
        try:
            raise RuntimeError("first line\\nsecond line")
        except RuntimeError:
            logger_of(0).exception("failed")
        logging.getLogger("legacy_ddp").warning("of other code")
    """
    (errors,) = _errors(tmp_path, code, LEGACY_DDP_LOG="json")

    first, second = map(json.loads, errors.splitlines())
    assert (first["level"], first["message"]) == ("ERROR", "failed")
    assert first["exception"].endswith("RuntimeError: first line\nsecond line")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    assert second == {"time": second["time"], "level": "WARNING", "logger": "legacy_ddp", "message": "of other code"}


def test_an_unknown_form_of_the_log_is_an_error_of_the_wrapper(tmp_path: Path) -> None:
    code = """
        try:
            wrap()
        except ValueError as error:
            print(error, file=sys.stderr)
            dist.destroy_process_group()
    """
    for errors in _errors(tmp_path, code, ranks=2, LEGACY_DDP_LOG="json,loud"):
        assert errors.startswith(
            "environment variable LEGACY_DDP_LOG: got 'loud', expected some of ('text', 'json', 'debug'"
        )


# What may raise on one rank: the line of a script, and what of it is told.
_RAISING = {
    "a handler": "logging.getLogger('legacy_ddp').addHandler(type('H', (logging.Handler,), {'emit': fail})())",
    "a filter": "logging.getLogger('legacy_ddp').addFilter(fail)",
    "a record factory": "logging.setLogRecordFactory(fail)",
}
_WITH_RAISING = """
    def fail(*_, **__):
        raise ValueError("the disk of the log\\x1b[31m is full")

    if dist.is_available() and os.environ["RANK"] == "0":
        {line}
"""


@pytest.mark.parametrize("what", _RAISING)
def test_what_the_script_adds_to_the_log_may_raise_on_one_rank_and_ends_no_call(what: str, tmp_path: Path) -> None:
    """The call of this rank ended, and the other rank got PeerLostError."""
    code = textwrap.dedent(_WITH_RAISING).format(line=_RAISING[what]) + textwrap.dedent(_CALLS)
    first, second = _errors(tmp_path, code, ranks=2, LEGACY_DDP_LOG="debug")

    assert "all_reduce() call 2: 16 bytes" in second
    assert "non-finite" in first  # of the warning
    assert "(legacy_ddp: the log of the script raised ValueError: the disk of the log\\x1b[31m is full)" in first
    assert re.search(rf"(?m)^{_TIME} DEBUG legacy_ddp rank 0: all_reduce\(\) call 2: 16 bytes", first), first


def test_ctrl_c_in_a_handler_ends_what_it_interrupts(tmp_path: Path) -> None:
    code = """
        def interrupt(record):
            raise KeyboardInterrupt
        logging.getLogger("legacy_ddp").addFilter(interrupt)
        try:
            logger_of(0).warning("text")
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
    """
    assert _errors(tmp_path, code) == ["interrupted\n"]


def test_a_record_has_its_place_and_its_exception_is_printable(tmp_path: Path) -> None:
    code = """
        logging.basicConfig(format="%(funcName)s %(filename)s %(message)s")
        def caller():
            try:
                raise ValueError("a\\x1b[31m colour")
            except ValueError:
                logger_of(0).exception("text\\x1b of %s", "other\\u202e origin")
        caller()
    """
    (errors,) = _errors(tmp_path, textwrap.dedent(code) + _EVERYWHERE)

    assert errors.startswith("caller script.py text\\x1b of other\\u202e origin\nTraceback (most recent call last):\n")
    # The place of a warning is the line of the script.
    assert "\nValueError: a\\x1b[31m colour\ntell script.py of all ranks\n" in errors
