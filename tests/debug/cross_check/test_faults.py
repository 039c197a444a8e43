"""A planted fault is named: rank, stage, module, operation and elements. Its twin without fault is silent."""

from functools import cache

import pytest

from tests.helpers.cross_faults import FAULTS, SILENT, Seen, seen_by_all
from tests.helpers.replica_scenes import SharedOutcomes
from tests.helpers.tiers import thorough

DOUBLE = "cross_faults::double"
# Verdict, stage, module, operation, different elements and the bit: see each fault.
EXPECTED = {
    "kernel": ("differs", "forward", "middle", DOUBLE, (1, 20)),
    "kernel once": ("once", "", "", "", None),
    "kernel once, captured": ("once", "forward", "middle", DOUBLE, None),
    "kernel without order": ("nondeterministic", "forward", "middle", DOUBLE, "all"),
    "kernel not capturable": ("differs", "", "", "", None),
    "kernel in backward": ("differs", "backward", "middle", DOUBLE, (1, 20)),
    "patched function": ("differs", "forward", "middle", "aten::gelu", "some"),
    "threads": ("differs", "forward", "middle", "aten::sum", (1, None)),
    "autocast": ("differs", "forward", "first", "aten::_to_copy", None),
    "seeded": ("differs", "forward", "drop", "aten::bernoulli_.float", "some"),
    "eval": ("differs", "forward", "drop", "aten::empty_like", None),
    "stale cache": ("differs", "forward", "middle", "aten::mul.Tensor", None),
    "thread": ("differs", "forward", "middle", "aten::exp", None),
    "extra operation": ("differs", "forward", "middle", "aten::clamp", None),
}
# Words of the explanation.
WORDS = {
    "kernel": "one bit flipped: bit 20",
    "kernel not capturable": "the capture of operations failed. ",
    "threads": "setting threads: ",
    "autocast": "setting autocast of cpu: ",
    "seeded": "next: look for seeds and draws inside of run and of the model",
    "eval": "setting module 'drop': ",
    "stale cache": "both runs had the same batch: state kept outside of parameters and buffers",
    "thread": "which no recorded operation did",
    "patched function": "settings: approximate='tanh'",
}
_LARGE = {"threads", "threads without order"}


@cache
def _seen(world_size: int, *guilty: int) -> SharedOutcomes[Seen]:
    return seen_by_all([*EXPECTED], world_size, *guilty)


@pytest.mark.parametrize("world_size, guilty", [thorough(2, 1), (3, 1), thorough(3, 0)])
@pytest.mark.parametrize("name", EXPECTED)
def test_a_fault_is_named_down_to_the_operation(name: str, world_size: int, guilty: int) -> None:
    seen = _seen(world_size, guilty)[name]
    verdict, stage, module, operation, elements = EXPECTED[name]

    # Two ranks have no majority, but a rank that disagrees with itself is known.
    ranks = (0, 1) if world_size == 2 and verdict == "differs" else (guilty,)
    assert (seen.verdict, seen.ranks) == (verdict, ranks), seen.text
    assert (seen.stage, seen.module, seen.operation) == (stage, module, operation), seen.text
    if elements in ("all", "some"):
        assert seen.elements is not None, seen.text
        assert seen.elements[0] > 1
    else:
        assert seen.elements == elements, seen.text
    assert WORDS.get(name, "") in " ".join(seen.text.split()), seen.text


def test_of_four_ranks_the_one_outside_the_majority_is_named() -> None:
    seen = seen_by_all(["kernel", "kernel in backward"], 4, 2)

    assert [seen[name].ranks for name in ("kernel", "kernel in backward")] == [(2,), (2,)]


def test_of_four_ranks_in_two_camps_all_are_shown() -> None:
    seen = seen_by_all(["kernel"], 4, 1, 2)["kernel"]

    assert (seen.verdict, seen.ranks) == ("differs", (0, 1, 2, 3))
    assert "ranks 0, 3 against ranks 1-2" in seen.text


def test_a_kernel_without_order_on_all_ranks_is_named_for_all() -> None:
    seen = seen_by_all(["kernel without order"], 3, 0, 1, 2)["kernel without order"]

    assert (seen.verdict, seen.ranks, seen.operation) == ("nondeterministic", (0, 1, 2), DOUBLE)
    assert "differ on every rank" in " ".join(seen.text.split())


def test_a_single_rank_finds_a_kernel_without_order() -> None:
    seen = seen_by_all(["kernel without order", "kernel"], 1, 0)

    assert seen["kernel"].verdict == "equal"  # a rank alone finds only what changes from run to run
    assert (seen["kernel without order"].verdict, seen["kernel without order"].operation) == (
        "nondeterministic",
        DOUBLE,
    )


@pytest.mark.parametrize("name", ["kernel in the first run, captured", "kernel once, captured"])
def test_a_single_rank_names_results_and_operation_of_one_event_in_either_of_its_first_runs(name: str) -> None:
    seen = seen_by_all([name], 1, 0)[name]
    text = " ".join(seen.text.split())

    assert (seen.verdict, seen.ranks) == ("once", (0,)), seen.text
    # The flipped output changes the loss, and the gradients of the layer after it and of the layer before it.
    assert "results: 0 of" not in text
    assert "differ, first the loss" in text
    assert (seen.module, seen.operation) == ("middle", DOUBLE), seen.text


def test_atomic_additions_of_threads_are_named_where_this_machine_shows_them() -> None:
    seen = seen_by_all(["threads without order"], 2, 0, 1)["threads without order"]

    if seen.verdict == "equal":
        pytest.skip("two threads gave one result in all runs on this machine")
    if seen.operation:  # a difference of the first runs may not return
        assert (seen.verdict, seen.operation) == ("nondeterministic", "aten::index_put_")


@pytest.mark.parametrize("world_size", [thorough(2), 3])
def test_without_a_fault_all_is_silent(world_size: int) -> None:
    seen = seen_by_all([*FAULTS, *SILENT], world_size)

    assert {name: seen[name].text for name in (*FAULTS, *SILENT) if seen[name].verdict != "equal"} == {}


def test_what_is_no_fault_stays_silent_on_one_rank_alone() -> None:
    seen = seen_by_all([*SILENT], 1, 0)

    assert {seen[name].verdict for name in SILENT} == {"equal"}
