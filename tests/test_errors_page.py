"""docs/errors.md has a section for every public exception, and shows what ranks print."""

import pickle
import re
import traceback
from collections.abc import Callable
from functools import partial
from itertools import chain

import pytest

import legacy_ddp
from legacy_ddp import LegacyDDPError
from legacy_ddp._collectives.check_interface import Check
from legacy_ddp._collectives.check_list import CHECKS, LateRankReport
from legacy_ddp.debug._explain import find, read_sections
from tests.helpers import logged_warnings
from tests.helpers.error_scenes import ERRORS, WARNINGS
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run_ranks

PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^### (.*)\n((?:(?!#).*\n)*)", PAGE, re.MULTILINE))
PATH = re.compile(r"\S*/rank-\d+")


def _shown(section: str) -> list[str]:
    """The parts of the example in a section, without line ends, cut where the page leaves words out."""
    lines = [line for line in SECTIONS[section].splitlines() if line.startswith("    ")]
    return [part for part in _one_line("\n".join(lines)).split(" ...") if part]


def _one_line(text: str) -> str:
    return PATH.sub("FILE", " ".join(text.split()))


def test_every_public_exception_has_a_section_and_every_section_a_next_step() -> None:
    errors = {name for name in legacy_ddp.__all__ if name.endswith("Error")}

    assert errors == {name for name in SECTIONS if name in vars(legacy_ddp)}
    assert ERRORS.keys() | WARNINGS.keys() <= SECTIONS.keys()
    for name, text in SECTIONS.items():
        assert "\nNext: " in text or name in ("AgreedError", "LegacyDDPError"), name


def test_the_anchor_of_an_exception_is_that_of_its_section() -> None:
    headings = {heading.lower() for heading in SECTIONS}

    for name in SECTIONS.keys() & vars(legacy_ddp).keys():
        assert getattr(legacy_ddp, name).anchor == name.lower()
        assert name.lower() in headings


@pytest.mark.parametrize("name", [name for name in legacy_ddp.__all__ if name.endswith("Error")])
def test_a_traceback_ends_with_the_command_also_after_pickle(name: str) -> None:
    error = getattr(legacy_ddp, name)("wrong")

    for shown in (error, pickle.loads(pickle.dumps(error))):
        lines = traceback.format_exception_only(shown)
        assert lines == [f"legacy_ddp.{name}: wrong\n", f"meaning and next step: legacy-ddp explain {name}\n"]
        assert str(shown) == "wrong"


def _error(rank: int, scene: Callable[[int], None]) -> tuple[str, str]:
    try:
        scene(rank)
    except (LegacyDDPError, ValueError) as error:
        return type(error).__name__, str(error)
    return "no error", ""


def _warnings(rank: int, scene: Callable[[int], None]) -> list[tuple[str, str]]:
    logged_warnings.sections()
    scene(rank)
    return [*zip(logged_warnings.take(), logged_warnings.sections(), strict=True)]


def _assert_shown(section: str, printed: str) -> None:
    rest = _one_line(printed)
    assert _shown(section)
    for part in _shown(section):
        assert part in rest
        rest = rest.split(part, 1)[1]


def _assert_explained(section: str, printed: str) -> None:
    """Every line with enough words to be of one text leads to the section, pasted behind ``legacy-ddp explain``."""
    lines = [line for line in printed.splitlines() if len(re.findall("[a-z]+", re.sub("'[^']*'", "", line))) >= 5]
    assert lines
    found = {line: [known.title for known in find(line, read_sections())] for line in lines}
    assert {line: titles for line, titles in found.items() if section not in titles} == {}


@pytest.mark.parametrize("section", ERRORS)
def test_an_error_has_the_text_that_its_section_shows(section: str) -> None:
    for rank, (name, text) in enumerate(run_ranks(partial(_error, scene=ERRORS[section]), 3)):
        if section == "PeerError" and rank == 1:  # has its own exception
            continue
        assert name in section
        _assert_shown(section, text)
        _assert_explained(section, text)


@pytest.mark.parametrize("section", WARNINGS)
def test_a_warning_has_the_text_that_its_section_shows(section: str) -> None:
    ((text, command),) = {*chain.from_iterable(run_ranks(partial(_warnings, scene=WARNINGS[section]), 3))}

    assert command == section  # the last line of the warning prints its section
    _assert_shown(section, text)
    _assert_explained(section, text)


def test_every_check_that_warns_has_a_section() -> None:
    warning = [kind for kind in CHECKS if kind.observe is not Check.observe or kind.compare is not Check.compare]

    assert {kind.section for kind in warning if kind is not LateRankReport} <= SECTIONS.keys()
