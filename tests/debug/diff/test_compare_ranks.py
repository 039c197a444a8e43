"""Comparison of the ranks of one run: differences, majorities and the phases which ranks share."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.command import Place, compare
from tests.helpers.recorded import PHASES, RANK_FILE
from tests.helpers.traces import NAMES, START, end_after, environment, without, write_trace

DIGEST, OTHER = "ab" * 8, "cd" * 8
WEIGHT = "parameter 'a'"


def compared(folder: Path, **written: Any) -> Any:
    return compare(write_trace(folder / "trace", **written))


def test_the_earliest_location_comes_first_and_counts_every_name_that_differs(tmp_path: Path) -> None:
    planted = {
        (1, 4, "reduced_gradients", "gradient of 'a'"): (DIGEST, 1.0),
        (2, 3, "parameters", "parameter 'b'"): (DIGEST, 1.0),
        (3, 3, "parameters", "parameter 'a'"): (OTHER, 1.0),
    }

    found = compared(tmp_path, world_size=5, planted=planted)

    assert found.first is not None
    assert (found.first.step, found.first.name, found.first.ranks) == (3, WEIGHT, (3,))
    assert [(other.name, other.ranks) for other in found.others] == [("parameter 'b'", (2,))]
    assert found.places == (Place(3, "parameters", (2, 3), 2, 2), Place(4, "reduced_gradients", (1,), 1, 2))


def test_the_first_ten_locations_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    # no two steps alike, so that none are joined
    planted = {(1, step, "parameters", NAMES["parameters"][step % 2]): (DIGEST, 1.0) for step in range(13)}

    found = compared(tmp_path, world_size=3, steps=12, planted=planted)

    assert [place.step for place in found.places] == list(range(10))
    assert found.more_places == 3
    assert found.headline.startswith("different: ranks part at the start (step 0) in parameters: ")


@pytest.mark.parametrize("odd", [0, 1])
def test_steps_one_after_the_other_in_which_the_same_names_differ_on_the_same_ranks_are_one_location(
    tmp_path: Path, odd: int
) -> None:
    planted = {(odd, step, "parameters", WEIGHT): (DIGEST, 1.0) for step in (*range(3, 8), *range(9, 13))}
    planted[2, 11, "optimizer", "exp_avg of 'a'"] = (DIGEST, 1.0)

    found = compared(tmp_path, world_size=3, steps=12, planted=planted)

    assert found.places == (
        Place(3, "parameters", (odd,), 1, 2, last_step=7, steps=5),
        Place(9, "parameters", (odd,), 1, 2, last_step=12, steps=4),
        Place(11, "optimizer", (2,), 1, 2),
    )
    assert found.more_places == 0


def test_where_every_rank_has_its_own_all_names_count(tmp_path: Path) -> None:
    planted = {(rank, 3, "parameters", WEIGHT): (f"{rank:016x}", 1.0) for rank in (1, 2)}
    planted[3, 3, "parameters", "parameter 'b'"] = (DIGEST, 1.0)

    found = compared(tmp_path, world_size=4, planted=planted)

    assert found.places == (Place(3, "parameters", (0, 1, 2, 3), 2, 2),)


def test_buffers_that_each_rank_has_of_its_own_are_left_out_and_others_are_not(tmp_path: Path) -> None:
    names = {**NAMES, "buffers": ("buffer 'bn.running_mean'", "buffer 'table'")}
    written = {
        "names": names,
        "environments": lambda rank, size: environment(rank, size, local_buffers=("*.running_*",)),
        "world_size": 3,
    }
    own = {(rank, 2, "buffers", "buffer 'bn.running_mean'"): (f"{rank:016x}", 1.0) for rank in range(3)}

    found = compared(tmp_path / "own", **written, planted=own)

    assert found.verdict == "same"
    assert found.notes == ("not compared, because each rank has its own: buffers *.running_*",)
    assert ", 114 tensors," in found.headline

    found = compared(tmp_path / "table", **written, planted={**own, (1, 4, "buffers", "buffer 'table'"): (DIGEST, 1.0)})

    assert found.first is not None
    assert (found.first.step, found.first.name, found.first.ranks) == (4, "buffer 'table'", (1,))
    assert found.places == (Place(4, "buffers", (1,), 1, 1),)


def test_names_in_another_order_on_one_rank_are_no_difference(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    planted = {
        (r, s, "parameters", f"parameter '{n}'"): (n * 16, 1.0) for r in range(3) for s in range(6) for n in "ab"
    }
    write_trace(folder, world_size=3, planted=planted)
    turned = {**NAMES, "parameters": NAMES["parameters"][::-1]}
    write_trace(tmp_path / "turned", world_size=3, planted=planted, names=turned)
    (tmp_path / "turned" / RANK_FILE.format(1)).replace(folder / RANK_FILE.format(1))

    assert compare(folder).verdict == "same"


def test_a_difference_besides_names_in_another_order_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "trace"
    planted = {
        (r, s, "parameters", f"parameter '{n}'"): (n * 16, 1.0) for r in range(3) for s in range(6) for n in "ab"
    }
    write_trace(folder, world_size=3, planted={**planted, (2, 4, "parameters", WEIGHT): (DIGEST, 1.0)})
    turned = {**NAMES, "parameters": NAMES["parameters"][::-1]}
    write_trace(tmp_path / "turned", world_size=3, planted=planted, names=turned)
    (tmp_path / "turned" / RANK_FILE.format(1)).replace(folder / RANK_FILE.format(1))

    found = compare(folder)

    assert found.first is not None
    assert (found.first.step, found.first.name, found.first.ranks) == (4, WEIGHT, (2,))
    assert found.places == (Place(4, "parameters", (2,), 1, 2),)


def test_ranks_with_equal_values_and_names_in_another_order_are_one_majority(tmp_path: Path) -> None:
    """Rank 0 stands alone in step 4; ranks 1 and 2 hold the same there, in another order of names."""
    folder = tmp_path / "trace"
    planted = {
        (r, s, "parameters", f"parameter '{n}'"): (n * 16, 1.0) for r in range(3) for s in range(6) for n in "ab"
    }
    planted.update({(rank, 4, "parameters", WEIGHT): (DIGEST, 1.0) for rank in (1, 2)})
    write_trace(folder, world_size=3, planted=planted)
    turned = {**NAMES, "parameters": NAMES["parameters"][::-1]}
    write_trace(tmp_path / "turned", world_size=3, planted=planted, names=turned)
    (tmp_path / "turned" / RANK_FILE.format(2)).replace(folder / RANK_FILE.format(2))

    found = compare(folder)

    assert found.first is not None
    assert (found.first.step, found.first.ranks) == (4, (0,))
    assert found.places == (Place(4, "parameters", (0,), 1, 2),)


def test_steps_that_not_all_ranks_recorded_are_left_out(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "trace", end=None, planted={(0, 5, "parameters", WEIGHT): (DIGEST, 1.0)})
    path = folder / RANK_FILE.format(1)
    without(path, lambda line: b'"step":5' in line)

    found = compare(folder)

    assert (found.verdict, found.steps) == ("same", (0, 4))
    assert found.notes == (
        "rank 0 ended after step 5 (killed, still running, or recorder stopped)",
        "rank 1 ended after step 4 (killed, still running, or recorder stopped)",
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_file_ends_early_is_not_called_the_same_in_the_steps_of_the_others(
    tmp_path: Path, rank: int
) -> None:
    folder = end_after(write_trace(tmp_path / "trace", steps=120) / RANK_FILE.format(rank), 4)

    found = compare(folder)

    assert (found.verdict, found.steps) == ("unknown", (0, 4))
    assert found.headline == (
        f"cannot tell: steps 5-120 were not compared on every rank, because rank {rank} ended before; nothing differs "
        "in steps 0-4"
    )


def test_tensors_are_counted_in_the_steps_of_all_ranks(tmp_path: Path) -> None:
    folder = end_after(write_trace(tmp_path / "trace") / RANK_FILE.format(1), 4)

    # 2 ranks x (start: 3 tensors; 4 steps: 2 + 2 + 2 + 1 tensors)
    assert compare(folder).headline == ("same: 2 ranks hold the same, steps 0-4, 5 phases, 62 tensors, bit for bit")


def test_phases_that_a_killed_rank_did_not_come_to_are_no_difference(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "trace", end=None)
    path = folder / RANK_FILE.format(1)
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))  # parameters and buffers of step 5

    assert compare(folder).verdict == "same"


def test_a_phase_missing_in_the_midst_is_a_difference(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "trace", world_size=3)
    path = folder / RANK_FILE.format(1)
    without(path, lambda line: b'"step":3,"phase":"buffers"' in line)

    found = compare(folder)

    assert found.first is not None
    assert (found.first.step, found.first.phase, found.first.ranks) == (3, "buffers", (1,))


def test_a_damaged_rank_that_agrees_up_to_there_is_unknown(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "trace")
    path = folder / RANK_FILE.format(1)
    path.write_bytes(path.read_bytes().replace(b'"step":3,"phase":"parameters"', b'"step":3,"phase":"parametres"'))

    found = compare(folder)

    assert found.verdict == "unknown"
    assert found.headline.startswith(f"cannot tell: {path}, line ")
    assert found.headline.endswith("nothing differs in what can be compared")


def test_environments_that_ranks_do_not_share_are_causes_but_for_seeds(tmp_path: Path) -> None:
    def odd(rank: int, size: int) -> Any:
        return environment(rank, size, facts={"torch": f"2.{13 + (rank == 1)}.0", "seed": str(rank), "pid": str(rank)})

    planted = {(1, 2, "parameters", WEIGHT): (DIGEST, 1.0)}
    found = compared(tmp_path, world_size=3, environments=odd, planted=planted)

    assert [(cause.what, cause.sides) for cause in found.causes] == [
        ("torch", (("ranks 0, 2", "2.13.0"), ("rank 1", "2.14.0")))
    ]


def test_many_ranks_are_compared_with_two_files_open_at_a_time(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    planted = {(77, 2, "parameters", WEIGHT): (DIGEST, 1.0)}
    folder = write_trace(tmp_path / "t", world_size=200, steps=2, planted=planted)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        found = compare(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    assert found.first is not None
    assert found.first.ranks == (77,)
    assert found.first.sides[0].label == "ranks 0-76, 78-199"


_PLACES = [(phase, name) for phase in PHASES[1:] for name in NAMES[phase]]


@settings(max_examples=40)
@given(st.data())
def test_one_difference_anywhere_is_found_on_its_rank(data: st.DataObject) -> None:
    world_size, steps = data.draw(st.integers(3, 6)), data.draw(st.integers(1, 8))
    phase, name = data.draw(st.sampled_from(_PLACES))
    step = data.draw(st.integers(0 if phase in START else 1, steps))
    rank = data.draw(st.integers(0, world_size - 1))
    with TemporaryDirectory() as folder:
        planted = {(rank, step, phase, name): (DIGEST, 0.5)}
        found = compared(Path(folder), world_size=world_size, steps=steps, planted=planted)

    assert found.first is not None
    assert (found.first.step, found.first.phase, found.first.name, found.first.ranks) == (step, phase, name, (rank,))
    assert found.places == (Place(step, phase, (rank,), 1, len(NAMES[phase])),)


def test_nan_on_a_rank_is_a_note(tmp_path: Path) -> None:
    planted = {(1, 3, "local_gradients", "gradient of 'a'"): (DIGEST, 1.0, 2)}
    found = compare(write_trace(tmp_path / "a", planted=planted))

    assert found.notes == ("NaN or infinity, first in local gradients of step 3 on rank 1",)


def test_buffers_can_be_left_out_afterwards(tmp_path: Path) -> None:
    folder = write_trace(tmp_path / "a", planted={(1, 3, "buffers", "buffer 'mean'"): (DIGEST, 1.0)})

    assert compare(folder).verdict == "different"
    assert compare(folder, local_buffers=("me*",)).verdict == "same"
