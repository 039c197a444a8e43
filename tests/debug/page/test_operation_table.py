"""The table of operations on the page: content, marks without colour, and the size of the page."""

from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any

from tests.helpers.operations import changed, model, operation, recordable, rewritten
from tests.helpers.report import Shown, report, titled, write_report
from tests.helpers.traces import environment, write_trace

LONG = ".".join(f"a_module_with_a_long_name_{index}" for index in range(30))
EVIL = "<img src=https://example.com/a.png>"
HEADER = ("", "A", "B", "stage", "module", "operation", "comparison")


def _traces(folder: Path, *sides: Sequence[Any], threads: tuple[str, str] = ("1", "1")) -> list[Path]:
    """Runs of one rank with these operations in step 3, where the local gradients part."""
    return [
        write_trace(
            folder / name,
            world_size=1,
            steps=3,
            operations=lambda step, _, side=side: recordable(side) if step == 3 else (),
            planted={(0, 3, "local_gradients", "gradient of 'a'"): (digest * 16, 1.0)},
            environments=lambda rank, size, count=count: environment(rank, size, facts={"threads": count}),
        )
        for name, side, digest, count in zip("ab", sides, "ef", threads, strict=True)
    ]


def _wrong_product(module: str = "2", position: int = 7) -> tuple[list[Any], list[Any]]:
    step = changed(model(), position, module=module)
    return step, rewritten(step, position, step[position].outputs[0].digest or "", "wrong")


def _table(folder: Path, *sides: Sequence[Any]) -> Shown:
    return titled(report(folder, *_traces(folder, *sides)), "Operations of step 3")


def test_the_first_difference_has_a_mark_of_its_own_and_what_follows_is_said_to_follow(tmp_path: Path) -> None:
    table = _table(tmp_path, *_wrong_product())

    assert table.table[0] == HEADER
    marked = [row for row in table.table if row[0]]
    assert marked == [("▶", "8", "8", "forward", "2", "aten::mm", "inputs agree, output differs")]
    assert "After the first difference, operations with other inputs follow from a difference" in table.captions[-1]


def test_rows_that_agree_are_not_said_to_follow_from_the_difference(tmp_path: Path) -> None:
    step = model()
    table = _table(tmp_path, step, [*step[:2], operation("clone", ["h0(x)"], ["h0(x)"]), *step[2:]])

    assert table.captions[-1].endswith("16 in A, 17 in B.")


def test_causes_and_operations_stand_before_the_long_list_of_the_page_and_names_are_text(tmp_path: Path) -> None:
    traces = _traces(tmp_path, *_wrong_product(module=EVIL), threads=("1", "4"))
    text = write_report(tmp_path, *traces).read_text(encoding="utf-8")

    parts = (
        *("may explain it</h2>", "<td>1 in A, 4 in B</td>"),
        *(
            "Operations of step 3",
            "Meaning: Other kernel, or another order of its sums: threads 1 in A, 4 in B.",
            "<pre>",
        ),
        "Difference of the two runs, by parameter and step</h2>",
    )
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert EVIL not in text
    assert f"<td>{EVIL}</td>" in unescape(text)


def test_many_causes_are_cut(tmp_path: Path) -> None:
    traces = [
        write_trace(
            tmp_path / name,
            environments=lambda *at, name=name: environment(*at, facts={f"fact {n}": name for n in range(33)}),
            planted={(0, 3, "parameters", "parameter 'a'"): (name * 16, 1.0)},
        )
        for name in "ab"
    ]

    causes = titled(report(tmp_path, *traces), "What differs around the training")

    assert len(causes.table) + int(causes.captions[0].split()[0]) == 1 + 33
    assert causes.captions[0].endswith(" more rows are left out.")


def test_the_table_stays_small(tmp_path: Path) -> None:
    extra = [operation("mul", [f"e{i}"], [f"e{i + 1}"], module=LONG) for i in range(2_000)]
    traces = _traces(tmp_path, model(), [*model()[:4], *extra, *model()[4:]])

    page = write_report(tmp_path, *traces).read_text(encoding="utf-8")

    assert 0 < page.count(LONG) < 50
