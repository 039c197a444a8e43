"""A planted fault is named: rank, stage, module, operation and elements. Its twin without fault is silent."""

from functools import cache

import pytest

from legacy_ddp.debug import CrossCheckReport
from tests.helpers.cross_faults import FAULTS, SILENT, seen_by_all
from tests.helpers.replica_scenes import SharedOutcomes
from tests.helpers.tiers import thorough

DOUBLE = "cross_faults::double"
# Verdict, stage, module, operation, different elements and the bit: see each fault; words of the explanation.
EXPECTED = {
    "kernel": ("differs", "forward", "middle", DOUBLE, (1, 20), "one bit flipped: bit 20"),
    "kernel once": ("once", "", "", "", None, ""),
    "kernel once, captured": ("once", "forward", "middle", DOUBLE, None, ""),
    "kernel without order": ("nondeterministic", "forward", "middle", DOUBLE, "all", "differ on rank 1; rank"),
    "kernel not capturable": ("differs", "", "", "", None, "the capture of operations failed. "),
    "kernel in backward": ("differs", "backward", "middle", DOUBLE, (1, 20), ""),
    "patched function": ("differs", "forward", "middle", "aten::gelu", "some", "settings: approximate='tanh'"),
    "threads": ("differs", "forward", "middle", "aten::sum", (1, None), "setting threads: "),
    "autocast": ("differs", "forward", "first", "aten::_to_copy", None, "setting autocast of cpu: "),
    "seeded": ("differs", "forward", "drop", "aten::bernoulli_.float", "some", "next: look for seeds and draws inside"),
    "eval": ("differs", "forward", "drop", "aten::empty_like", None, "setting module 'drop': "),
    "stale cache": ("differs", "forward", "middle", "aten::mul.Tensor", None, "had the same batch: state kept outside"),
    "thread": ("differs", "forward", "middle", "aten::exp", None, "which no recorded operation did"),
    "extra operation": ("differs", "forward", "middle", "aten::clamp", None, ""),
}


@cache
def _seen(world_size: int, *guilty: int) -> SharedOutcomes[CrossCheckReport]:
    return seen_by_all(dict.fromkeys(EXPECTED, guilty), world_size)


@pytest.mark.parametrize("world_size, guilty", [thorough(2, 1), (3, 1)])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_fault_is_named_down_to_the_operation(name: str, world_size: int, guilty: int) -> None:
    seen = _seen(world_size, guilty)[name]
    text = str(seen)
    verdict, stage, module, operation, elements, words = EXPECTED[name]

    # Two ranks have no majority, but a rank that disagrees with itself is known.
    ranks = (0, 1) if world_size == 2 and verdict == "differs" else (guilty,)
    assert (seen.verdict, seen.ranks) == (verdict, ranks), text
    assert (seen.stage, seen.module, seen.operation) == (stage, module, operation), text
    if elements in ("all", "some"):
        assert seen.elements is not None, text
        assert seen.elements.count > 1
    else:
        assert (seen.elements and (seen.elements.count, seen.elements.bit)) == elements, text
    assert words in " ".join(text.split()), text


def test_of_four_ranks_the_one_outside_the_majority_is_named_and_without_a_majority_all_are() -> None:
    scenes = {"kernel": (2,), "kernel in backward": (1, 2), "kernel without order": (0, 1, 2, 3)}

    seen = seen_by_all(scenes, 4)
    one, two, every = (seen[name] for name in scenes)

    assert one.ranks == (2,)
    assert (two.verdict, two.ranks) == ("differs", (0, 1, 2, 3))
    assert "ranks 0, 3 against ranks 1-2" in str(two)
    assert (every.verdict, every.ranks, every.operation) == ("nondeterministic", (0, 1, 2, 3), DOUBLE)
    assert "differ on every rank" in " ".join(str(every).split())


CAPTURED = ("kernel in the first run, captured", "kernel once, captured")


@cache
def _of_a_single_rank() -> SharedOutcomes[CrossCheckReport]:
    names = "kernel", "kernel without order", *CAPTURED, *SILENT
    return seen_by_all(dict.fromkeys(names, (0,)), 1)


def test_a_single_rank_finds_only_what_changes_from_run_to_run() -> None:
    seen = _of_a_single_rank()
    unordered = seen["kernel without order"]

    assert {seen[name].verdict for name in ("kernel", *SILENT)} == {"equal"}
    assert (unordered.verdict, unordered.operation) == ("nondeterministic", DOUBLE)
    assert "of rank 0 differ on rank 0 " in " ".join(str(unordered).split())


@pytest.mark.parametrize("name", CAPTURED)
def test_a_single_rank_names_results_and_operation_of_one_event_in_either_of_its_first_runs(name: str) -> None:
    seen = _of_a_single_rank()[name]
    text = " ".join(str(seen).split())

    assert (seen.verdict, seen.ranks) == ("once", (0,)), str(seen)
    # The flipped output changes the loss, and the gradients of the layer after it and of the layer before it.
    assert "results: 0 of" not in text
    assert "differ, first the loss" in text
    assert (seen.module, seen.operation) == ("middle", DOUBLE), str(seen)


def test_without_a_fault_all_is_silent() -> None:
    seen = seen_by_all(dict.fromkeys([*FAULTS, *SILENT], ()), 3)

    assert {name: str(seen[name]) for name in (*FAULTS, *SILENT) if seen[name].verdict != "equal"} == {}
