"""``legacy-ddp explain``: the sections of docs/errors.md on a terminal, by every name that a message ends with."""

import re
from itertools import pairwise

import pytest

import legacy_ddp
from tests.helpers.command import command
from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
# Title and text of each section.
_PARTS = re.split(r"^(##|###) (.*)\n", PAGE, flags=re.MULTILINE)[1:]
SECTIONS = {title: body for level, title, body in zip(*[iter(_PARTS)] * 3, strict=True) if level == "###"}
TITLES = [*SECTIONS]
# As they stand in the log.
ENDS = (
    "2026-11-29 05:02:12,633 WARNING legacy_ddp rank 0: rank 1 left after all_reduce() call 4 with ValueError: bad",
    "rank 1 left after all_reduce() call 4 with exit status 3, at kill9.py:12 in <module>",
    "rank 1 left ...",
    "rank 1 ended unexpectedly; this rank ends because the connection to it is lost",
)
WAITS = (
    "WARNING legacy_ddp rank 0: outside of calls: rank 1 has waited 3 s in barrier() at x.py:9 in <module>",
    "outside of calls",
    "first collective on this process group: rank 0 has not come within 4 s",
    "first collective on this process group: all ranks have come after 9 s",
    "all_reduce() call 6, phase agree: ranks have waited for 3.3 s; missing rank 1 (barrier()",
    "2026-11-29 05:02:12,633 WARNING legacy_ddp rank 0: all_reduce() call 6: all ranks have arrived, and",
    "the wait outside of calls has ended",
)


def _of_argument(kind: type[Exception]) -> Exception:
    """A wrong argument of the library."""
    given = {TypeError: {"local_buffers": 3}, ValueError: {"level": "all"}}[kind]
    with pytest.raises(kind) as caught:
        legacy_ddp.Checks(**given)
    return caught.value


def _explained(*name: str) -> list[str]:
    """The lines that the command prints."""
    done = command("explain", *name)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


ERRORS = [
    *[getattr(legacy_ddp, name)("wrong") for name in legacy_ddp.__all__ if name.endswith("Error")],
    _of_argument(TypeError),
    _of_argument(ValueError),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_the_command_at_the_end_of_an_error_prints_its_section(error: Exception) -> None:
    before, _, name = error.__notes__[-1].rpartition("legacy-ddp explain ")

    assert (before, name) == ("meaning and next step: ", type(error).__name__)
    title, rule, empty, *_ = _explained(name)
    assert name in title.split(" and ")
    assert (set(rule), empty) == ({"="}, "")


def test_an_error_of_a_user_that_derives_from_ours_is_explained_by_ours() -> None:
    class MineError(legacy_ddp.LayoutError):
        """Of a script."""

    assert MineError("wrong").__notes__ == ["meaning and next step: legacy-ddp explain LayoutError"]


def test_without_a_name_all_titles_are_listed_by_group() -> None:
    printed = _explained()

    assert [line.strip() for line in printed if line.startswith("  ")] == TITLES
    groups = re.findall(r"^## (.*)$", PAGE, re.MULTILINE)
    assert [line for line in printed[1:] if line and not line.startswith(" ")] == groups
    assert max(map(len, printed)) <= 80


@pytest.mark.parametrize("title", TITLES)
def test_a_section_fits_80_columns_and_has_every_word_of_the_page(title: str) -> None:
    lines = _explained(title)

    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines[2:]).split())
    assert "](" not in text
    shown = re.sub(r'"([^"]*)" \(docs/[\w/-]+\.md in the source\)', r"\1", text)
    assert shown == " ".join(re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", SECTIONS[title]).split())


def test_paragraphs_are_filled_and_long_lines_of_an_example_go_on_below() -> None:
    assert _explained("LayoutError")[:9] == [
        "LayoutError",
        "===========",
        "",
        "Ranks hold different parameters, buffers or settings. The text names each",
        "difference and its ranks.",
        "",
        "    all_reduce() call 1: ranks hold different parameters, buffers or settings:",
        "      parameter '1.bias': rank 1 has float32 (1,) on cpu#0, frozen; ranks 0, 2",
        "        have float32 (1,) on cpu#0, trainable, strides (1,)",
    ]


@pytest.mark.parametrize(
    "text, titles",
    [
        ("layouterror", ["LayoutError"]),
        ("legacy_ddp.LayoutError:", ["LayoutError"]),
        ("docs/errors.md#typeerror-and-valueerror", ["TypeError and ValueError"]),
        ("ValueError", ["TypeError and ValueError"]),
        ("replicas-differ", ["Replicas differ"]),
        ("Replicas differ", ["Replicas differ"]),
        ("replicas  DIFFER", ["Replicas differ"]),
        ("gradients changed between backward and the call", ["Gradients were changed", "EditedGradientError"]),
        ("legacy_ddp.DesyncError: all_reduce() call 16: ranks made different numbers of optimizer", ["DesyncError"]),
        ("rank 2: no backward since the last call, gradients unchanged: an extra call", ["DesyncError"]),
        ("train.py:9: UserWarning: all_reduce() call 7: ranks bring uneven work (warned once):", ["Uneven work"]),
        ("all_reduce() call 4, phase agree: no answer within 3 s; missing rank 2 (user", ["SyncTimeoutError"]),
        ("got 3 in 2; put each micro-batch into a no_sync() block of its own,", ["Merged micro-batches"]),
        ("checks: edited is unknown: got 'no', expected one of ('warn', 'raise')", ["TypeError and ValueError"]),
        ("an exception inside no_sync() ended this rank's micro-batch 2 (counted from 1)", ["GradientError"]),
        ("every rank gets them now (warned once until all are finite again); see", ["Gradients are not finite"]),
        (
            "  who: a count cannot tell: rank 1 against rank 0, no majority",
            ["Replicas differ", "ReplicaDivergenceError"],
        ),
        ("ranks bring uneven work", ["Uneven work", "DesyncError"]),
        ("connection lost after 0.15 s", ["PeerLostError"]),
        *((line, ["A rank has ended"]) for line in ENDS),
        *((line, ["Ranks have waited"]) for line in WAITS),
        ("missing rank 0 (left without an error after all_reduce() call 40, on host vm", ["PeerLostError"]),
        ("the trace in /x holds no step: the recorder saw no all_reduce() that succeeded; give", ["Trace warnings"]),
        ("meaning and next step: legacy-ddp explain Replicas differ", ["Replicas differ"]),
        ("no shared memory (the limit of open files of this process is reached; raise", ["Shared memory has failed"]),
    ],
)
def test_sections_are_found_by_title_anchor_class_and_by_a_line_of_a_text(text: str, titles: list[str]) -> None:
    printed = _explained(*text.split(" "))

    underlined = [above for above, below in pairwise(printed) if below and {*below} == {"="}]
    assert [title.startswith(start) for title, start in zip(underlined, titles, strict=True)] == [True] * len(titles)


OF_OTHER_CODE = (
    "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB",
    "ValueError: not enough values to unpack (expected 2, got 1)",
    "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
    "Epoch 3: the loss is 0.123, the accuracy 0.97, and the learning rate 0.001",
    "xyzzy",
)


@pytest.mark.parametrize(
    "name, closest",
    [
        ("LayotError", "LayoutError"),
        ("timeout", "SyncTimeoutError"),
        ("hook", "CommHookError"),
        *((line, None) for line in OF_OTHER_CODE),
    ],
)
def test_an_unknown_name_or_a_line_of_other_code_is_status_2_with_close_names(name: str, closest: str | None) -> None:
    done = command("explain", name)

    assert (done.returncode, done.stdout) == (2, "")
    before, after = f"legacy-ddp: error: {name!r} is not known here: ", "legacy-ddp explain lists all names\n"
    assert done.stderr.startswith(before)
    assert done.stderr.endswith(after)
    advice = done.stderr.removeprefix(before).removesuffix(after)
    assert advice.startswith("did you mean ") if closest else advice == ""
    assert (closest or "") in advice
