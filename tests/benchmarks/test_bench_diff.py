"""The comparison of two results files tells what changed, and only that."""

import copy
import json
from pathlib import Path
from typing import Any

import _results
import diff
import pytest

LONG = "a row whose name does not fit into its column"


def _row(ratio: float, spread: float = 0.1, n: int = 100, median_ms: float = 10.0, **more: Any) -> dict[str, Any]:
    quartiles = [ratio - spread / 2, ratio + spread / 2]
    return {"n": n, "median_ms": median_ms, "median_ratio": ratio, "ratio_quartiles": quartiles, **more}


def _document(**results: Any) -> dict[str, Any]:
    environment = {"torch": "2.13", "commit": "abc", "load_average_at_end": [0.5, 1.0, 1.5]}
    return {"environment": environment, "arguments": {"rounds": 8}, "results": results}


def _compare(old: Any, new: Any, threshold: float = 0.05) -> dict[str, str]:
    """What became of each row and number, if anything did."""
    found = diff.compare(_results.parse_results(old, "old"), _results.parse_results(new, "new"), threshold)
    return {"/".join(one.place): one.judgement for one in found if one.judgement}


def _run(tmp_path: Path, old: Any, new: Any, *more: str) -> int:
    for name, document in (("old.json", old), ("new.json", new)):
        (tmp_path / name).write_text(json.dumps(document))
    return diff.main([str(tmp_path / "old.json"), str(tmp_path / "new.json"), *more])


@pytest.mark.parametrize(
    "ratio,spread,threshold,judgement",
    [
        (1.20, 0.1, 0.05, "worse"),
        (0.80, 0.1, 0.05, "better"),
        (1.20, 1.2, 0.05, ""),  # 1.0157 and 1.2 - 0.1884 still touch
        (1.20, 1.1, 0.05, "worse"),  # 1.2 - 0.1727: just not
        (1.04, 0.1, 0.05, ""),  # outside of the noise, below the threshold
        (1.04, 0.1, 0.03, "worse"),
    ],
)
def test_a_row_changed_if_its_interval_and_the_threshold_say_so(
    ratio: float, spread: float, threshold: float, judgement: str
) -> None:
    old = _document(step={"first": _row(1, 0), "second": _row(1.0)})  # 1 +- 0.0157
    new = _document(step={"first": _row(1, 0), "second": _row(ratio, spread)})

    assert _compare(old, new, threshold) == ({"step/second": judgement} if judgement else {})


@pytest.mark.parametrize(
    "place,old,new,judgement",
    [
        ("peak_mib", 100, 104, ""),
        ("peak_mib", 100, 105.2, "worse"),  # by the smaller of the two, so that both ways are alike
        ("peak_mib", 105.2, 100, "better"),
        ("gradients_ratio", 1.0, 2.0, "worse"),
        ("gigabytes_per_second", 4.0, 3.0, "worse"),
        ("most_ranks", 180, 100, "worse"),
        ("allocations_per_step", 0, 1, "worse"),
        ("exchange_ms/64", 1.0, 2.0, "worse"),  # the unit stands above
        ("fresh_mib", 0.0, 0.009, ""),  # too little to tell
        ("aim", 1.0, 1.1, "changed"),
        ("ratios/detail", 1.0, 2.0, "changed"),
        ("verdict", "met", "missed", "changed"),
        ("peak_mib", 1.0, None, "changed"),
        ("peak_mib", -1.0, 1.0, "worse"),
    ],
)
def test_a_number_alone_is_judged_by_its_unit(place: str, old: Any, new: Any, judgement: str) -> None:
    def document(value: Any) -> dict[str, Any]:
        for part in reversed(place.split("/")):
            value = {part: value}
        return _document(table=value, rows={"first": _row(1)})

    assert _compare(document(old), document(new)) == ({f"table/{place}": judgement} if judgement else {})


def test_in_a_timed_row_other_numbers_count_and_other_times_do_not() -> None:
    old = _document(step={"first": _row(1, fresh_mib_per_run=1.0, p90_ms=1.0, phase_ms={"agree": 1.0})})
    new = _document(step={"first": _row(1, fresh_mib_per_run=2.0, p90_ms=9.0, phase_ms={"agree": 9.0})})

    assert _compare(old, new) == {"step/first/fresh_mib_per_run": "worse"}


def test_ratios_to_different_rows_are_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = _document(step={"off": _row(1, 0), "info": _row(1.1)})
    new = _document(step={"torch DDP": _row(1, 0), "info": _row(2.0)})

    assert _compare(old, new) == {"step/info": "changed"}
    assert _run(tmp_path, old, new) == 0
    assert "note: ratios are to 'off' in the old file, 'torch DDP' in the new one" in capsys.readouterr().out


def test_all_that_differs_is_told_in_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = _document(step={"off": _row(1, 0), LONG: _row(1.0), "gone": _row(1.0)}, verdict="met")
    new = copy.deepcopy(old)
    new["environment"].update(torch="2.14", load_average_at_end=[3.0, 1.0, 1.5])
    new["arguments"]["rounds"] = 16
    new["results"]["step"][LONG] = _row(1.5)
    new["results"]["step"]["another " * 20] = new["results"]["step"].pop("gone")
    new["results"]["verdict"] = "missed"

    assert _run(tmp_path, old, new) == 1
    told = capsys.readouterr().out

    assert max(map(len, told.splitlines())) <= 80
    for line in (
        "torch: 2.13 -> 2.14",
        "load_average_at_end: 0.5 1 1.5 -> 3 1 1.5",
        "rounds: 8 -> 16",
        LONG,
        f"{'':36}    10.00    10.00   1.00   1.50  +50% worse",
        "verdict: met -> missed, changed",
        "  step / gone",
        "3 compared: 1 worse, 0 better",
    ):
        assert line in told.splitlines()
    assert "commit" not in told


def test_better_is_no_failure(tmp_path: Path) -> None:
    old, new = (_document(step={"off": _row(1, 0), "info": _row(ratio)}) for ratio in (1.5, 1.0))

    assert (_run(tmp_path, old, new), _run(tmp_path, new, old)) == (0, 1)
    assert _run(tmp_path, new, old, "--threshold", "0.6") == 0


@pytest.mark.parametrize(
    "content,said",
    [
        (None, "cannot be read: No such file"),
        ("{", "is no JSON"),
        ("[1, 2]", "is no results file: it has no object 'environment'"),
        ('{"environment": {}}', "is no results file: it has no object 'results'"),
        ('{"environment": {}, "results": {"step": {"off": {"median_ratio": 1}}}}', "step / off is no row of times"),
        (json.dumps(_document(other={"peak_mib": 1.0})), "they share no row and no number\nold: step\nnew: other"),
        (json.dumps(_document()), "they share no row and no number"),
    ],
)
def test_what_cannot_be_compared_is_said_clearly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, said: str
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(json.dumps(_document(step={"off": _row(1)})))
    if content is not None:
        new.write_text(content)

    assert diff.main([str(old), str(new)]) == 2

    told = capsys.readouterr()
    assert told.out == ""
    assert said in told.err
    assert said.startswith("they") or str(new) in told.err
