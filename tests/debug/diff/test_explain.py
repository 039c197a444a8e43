"""Explanations follow from the phase of a divergence and from the evidence."""

from typing import Any

import pytest

from legacy_ddp.debug._diff.explain import Evidence, explain
from legacy_ddp.debug._diff.pair import Growth
from legacy_ddp.debug._diff.result import Divergence, Side
from legacy_ddp.debug._trace.records import PHASES


def explained(phase: str, **changes: Any) -> str:
    """The explanation of a divergence at step 7 with complete evidence and no cause."""
    sides = changes.pop("sides", (Side("A", "0.1", None), Side("B", "0.2", None)))
    given: dict[str, Any] = {
        "kind": "runs",
        "first": Divergence(7, phase, "lr of parameter group 0", "", (1,), sides),
        "compared": PHASES,
        "is_start": False,
        "previous": 6,
        "inputs_known": True,
        "generators_known": True,
        "world_size": 3,
    }
    return explain(Evidence(**{**given, **changes}))


@pytest.mark.parametrize(
    "phase, words",
    [
        ("settings", "begin with other settings of the optimizer: lr of parameter group 0 is 0.1 in A and 0.2 in B."),
        ("optimizer", "another checkpoint, or one loaded in one run only"),
        ("parameters", "another seed, another initialisation or another checkpoint"),
        ("buffers", "Weights agree. The runs begin with other buffers"),
    ],
)
def test_a_divergence_at_the_start_comes_from_before_training(phase: str, words: str) -> None:
    text = explained(phase, is_start=True)

    assert words in text
    assert "step" not in text


def test_weights_that_differ_at_the_start_name_seeds_only_if_they_differ() -> None:
    assert "Their seeds differ." in explained("parameters", is_start=True, causes=frozenset({"seed"}))
    assert "Their seeds differ." not in explained("parameters", is_start=True)


def test_state_that_one_run_lacks_at_the_start_was_not_restored() -> None:
    text = explained("optimizer", is_start=True, sides=(Side("A", "ab", 1.0), Side("B", None, None)))

    assert text == "Only A holds it there: was the optimizer's state left out of a checkpoint, or of loading it?"


@pytest.mark.parametrize(
    "causes, expected",
    [
        ({"data"}, "The forward passes were given other data."),
        ({"micro-batch shape"}, "The forward passes were given micro-batches of another shape."),
        ({"micro-batches"}, "The runs took another number of micro-batches."),
        ({"forward passes"}, "The runs took another number of forward passes."),
        ({"random generators"}, "Random generators differ, so dropout may have drawn other masks."),
    ],
)
def test_what_differs_around_local_gradients_is_named_and_not_ruled_out(causes: set[str], expected: str) -> None:
    text = explained("local_gradients", causes=frozenset(causes))

    assert expected in text
    assert "Look at: other code" not in text
    assert ("equal data" in text) == (causes == {"random generators"})
    # Equal generators give the same masks, but perhaps not to the same data.
    assert ("dropout has drawn from the same numbers" in text) == (causes <= {"micro-batches", "forward passes"})


def test_equal_data_and_generators_leave_arithmetic_and_what_is_outside_the_module() -> None:
    text = explained("local_gradients")

    assert text.startswith("All that was compared up to step 6 agrees. Local gradients are the first to differ:")
    assert "The forward passes were given equal data, so the data are ruled out. Random generators are equal" in text
    assert "Look at: other code or arguments of the model" in text
    assert "other targets in a loss outside the module" in text


@pytest.mark.parametrize("unknown", ["inputs_known", "generators_known"])
def test_nothing_is_ruled_out_that_was_not_recorded(unknown: str) -> None:
    text = explained("local_gradients", **{unknown: False})

    assert "Look at: other code" not in text
    assert ("cannot be told: not all inputs were recorded" in text) == (unknown == "inputs_known")
    assert ("dropout has drawn from the same numbers" in text) == (unknown == "inputs_known")


def test_reduced_gradients_part_in_the_sum_only_if_local_ones_are_known_to_agree() -> None:
    assert "All local gradients agree, so the difference comes from their reduction" in explained("reduced_gradients")
    unknown = explained("reduced_gradients", compared=PHASES[1:])
    assert "All local gradients agree" not in unknown
    assert "Local gradients were not recorded by both" in unknown
    shares = explained("reduced_gradients", causes=frozenset({"sample_size"}))
    assert "The ranks took other amounts" in shares


def test_other_world_sizes_sum_in_another_order() -> None:
    text = explained("reduced_gradients", kind="sizes", compared=PHASES[1:], size=3e-7)

    assert "Local gradients of other world sizes cannot be compared" in text
    assert "only if sums are taken in the same order" in text
    assert "differ by at most 3e-07 relative: of rounding size, judged by norms alone" in text


def test_settings_are_named_with_both_values() -> None:
    assert "lr of parameter group 0 is 0.1 in A and 0.2 in B. Look for another schedule" in explained("settings")


@pytest.mark.parametrize(
    "phase, compared, words",
    [
        (
            "optimizer",
            PHASES,
            "Reduced gradients and settings agree, so the cause is something else after the previous step.",
        ),
        ("parameters", PHASES, "Reduced gradients, settings and optimizer state agree, so only weights differ."),
        ("parameters", ("reduced_gradients", "parameters"), "Settings were not recorded; reduced gradients agree, so "),
        ("parameters", ("parameters",), "Reduced gradients and settings were not recorded; the cause came between"),
        ("buffers", PHASES, "Only buffers differ. Possible are forward passes in training mode that made no gradients"),
    ],
)
def test_after_the_call_what_agrees_is_named_as_far_as_it_was_recorded(
    phase: str, compared: tuple[str, ...], words: str
) -> None:
    assert words in explained(phase, compared=compared)


def test_steps_that_were_not_compared_are_where_the_cause_may_lie() -> None:
    assert "Steps after 2 and before this one were not compared" in explained("parameters", previous=2)
    assert "Nothing before this step was compared" in explained("parameters", previous=None)
    assert "All that was compared" not in explained("parameters", previous=2)


@pytest.mark.parametrize(
    "size, growth, words",
    [
        (
            1e-5,
            Growth(9, 8, "parameter 'a'"),
            "of rounding size, judged by norms alone. It grows beyond 0.1% at step 8",
        ),
        (1e-5, Growth(9), "Up to step 9, no norm of weights or reduced gradients differs by more than 0.1%."),
        (1.1e-5, None, "differ by up to 1.1e-05 relative: more than rounding usually makes at once."),
    ],
)
def test_the_size_of_a_difference_is_judged_by_norms(size: float, growth: Growth | None, words: str) -> None:
    assert words in explained("local_gradients", size=size, growth=growth)


def test_without_norms_the_size_is_left_out() -> None:
    assert "Norms" not in explained("local_gradients", size=None)


@pytest.mark.parametrize(
    "phase, is_start, words",
    [
        ("reduced_gradients", False, "Ranks left one call with other gradients: a transport or memory"),
        ("settings", False, "a scheduler that is ahead"),
        ("optimizer", True, "a checkpoint loaded on some of them only"),
        ("optimizer", False, "Possible are gradients clipped or edited on some ranks only, a step left out, a"),
        ("parameters", True, "seeds with init_sync=False"),
        ("parameters", False, "Possible are a write to weights outside of step(), a step left out on some ranks"),
        ("buffers", False, "leave them out here, --local-buffers"),
    ],
)
def test_between_ranks_every_phase_has_causes_of_its_own(phase: str, is_start: bool, words: str) -> None:
    assert words in explained(phase, kind="ranks", is_start=is_start)


@pytest.mark.parametrize("kind", ["runs", "sizes", "ranks"])
@pytest.mark.parametrize("is_start", [True, False])
@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_that_can_part_has_an_explanation(kind: str, is_start: bool, phase: str) -> None:
    if (is_start and phase.endswith("gradients")) or (kind != "runs" and phase == "local_gradients"):
        return  # no call was made before the start, and local gradients are each rank's own

    text = explained(phase, kind=kind, is_start=is_start)

    assert text.endswith((".", "?"))
    assert "  " not in text
