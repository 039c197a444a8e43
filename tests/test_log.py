"""The log as a script sees it: lines by default, and the handlers of the script in their place."""

import re
import textwrap
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
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
    LegacyDistributedDataParallel(torch.nn.Linear(3, 1))
    dist.destroy_process_group()
"""
PAGE = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8")
BY_LEVEL, BY_HANDLER = (
    recipe
    for recipe in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    if "import logging" in recipe
)


def _errors(folder: Path, code: str, ranks: int = 1) -> list[str]:
    """What scripts with this code write to stderr, on each rank."""
    (folder / "script.py").write_text(_START + textwrap.dedent(code))
    places = [{"RANK": str(rank)} for rank in range(ranks)]
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
    first, second = _errors(tmp_path, BY_LEVEL + "wrap()", ranks=2)

    assert re.match(rf"{_TIME} INFO legacy_ddp rank 0: new wrapper: ", first), first
    assert second == ""


def test_the_recipe_with_a_handler_shows_every_rank_once_and_other_loggers(tmp_path: Path) -> None:
    level = 'logging.getLogger("legacy_ddp").setLevel("INFO")\nlogging.getLogger("other").warning("here")\n'

    for rank, errors in enumerate(_errors(tmp_path, BY_HANDLER + level + "wrap()", ranks=2)):
        assert errors.count("new wrapper") == 1
        assert re.search(rf"(?m)^{_TIME} INFO legacy_ddp rank {rank}: new wrapper: ", errors), errors
        assert re.search(rf"(?m)^{_TIME} WARNING other rank -: here$", errors), errors


@pytest.mark.parametrize(
    "handler, expected",
    [
        ('logging.basicConfig(format="own %(message)s")', "own text\n"),
        ('logging.getLogger("legacy_ddp").addHandler(logging.NullHandler())', ""),
        ('logging.getLogger("legacy_ddp").propagate = False; logging.basicConfig()', None),
        ("logger_of(1); logging.basicConfig(format='own %(message)s')", "own text\n"),
    ],
)
def test_a_handler_that_gets_the_records_takes_the_place_of_the_lines(
    handler: str, expected: str | None, tmp_path: Path
) -> None:
    (errors,) = _errors(tmp_path, f'{handler}\nlogger_of(1).warning("text")\n')

    if expected is None:  # the root has a handler, which gets no record
        assert re.fullmatch(rf"{_TIME} WARNING legacy_ddp rank 1: text\n", errors)
    else:
        assert errors == expected


def test_a_warning_of_all_ranks_is_shown_once_on_rank_0_and_not_in_the_default_lines(tmp_path: Path) -> None:
    code = """
        warn(0, "of all ranks", is_everywhere=True)
        warn(1, "of all ranks", is_everywhere=True)
        warnings.simplefilter("error")
        warn(0, "made an error")
    """
    (errors,) = _errors(tmp_path, code)

    assert errors.count("UserWarning: of all ranks") == 1
    assert errors.count("of all ranks") == 2  # the text, and the line of the source
    assert re.search(rf"(?m)^{_TIME} WARNING legacy_ddp rank 0: made an error$", errors), errors


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
