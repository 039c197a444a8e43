"""The Trainer: strategy ``legacy_ddp`` gives the weights of strategy ``ddp``, with every option of Lightning."""

from datetime import timedelta
from typing import Any

import pytest
import torch

from tests.helpers.lightning_scenarios import by_trainer, needs_lightning
from tests.helpers.scripts import EXAMPLES, assert_same_bits, run_script

pytestmark = needs_lightning


@pytest.fixture(name="left", scope="module")
def what_the_ranks_left() -> Any:
    return by_trainer()


def test_clipped_steps_of_several_batches_and_of_a_shorter_last_window_are_those_of_ddp(left: Any) -> None:
    assert_same_bits(left("accumulating"), left("accumulating", "ddp"))


def test_on_after_backward_sees_the_mean_once_a_window_is_complete(left: Any) -> None:
    (first, second) = (told["seen"] for told in left("accumulating"))

    assert [at for at, pair in enumerate(zip(first, second, strict=True), 1) if len({*pair}) == 1] == [4, 8, 11]


def test_ranks_meet_once_per_step_and_not_while_batches_accumulate(left: Any) -> None:
    assert [told["calls"] for told in left("first")] == [3, 3]  # 11 batches, windows of 4


def test_the_process_group_has_the_backend_and_the_timeout_that_were_asked_for(left: Any) -> None:
    assert [(told["backend"], told["timeout"]) for told in left("first")] == [("gloo", timedelta(seconds=90))] * 2


@pytest.mark.parametrize("story", ["adversaries", "by_hand", "hooked", "local_sgd", "normed", "sharded"])
def test_what_lightning_offers_leaves_what_it_leaves_under_ddp(left: Any, story: str) -> None:
    ours = left(story)

    assert ours[0]
    assert_same_bits(ours, left(story, "ddp"))


def test_a_step_that_overflows_in_fp16_on_one_rank_is_skipped_on_all_as_by_ddp(left: Any) -> None:
    ours = left("in_fp16")

    assert_same_bits(ours, left("in_fp16", "ddp"))
    assert [told["scale"] for told in ours] == [2.0**15] * 2  # half of what it began with: one step was skipped


def test_training_begins_with_the_weights_of_rank_0(left: Any) -> None:
    first, second = left("different_starts")

    assert first["drawn"] != second["drawn"]
    assert_same_bits(first["state"], second["state"])
    assert_same_bits(first["state"], left("different_starts", "ddp")[0]["state"])


def test_arguments_of_the_wrapper_reach_it(left: Any) -> None:
    first, second = left("configured")

    for told in (first, second):
        assert told["settings"] == (
            "buffer_size=7, gradient_as_bucket_view=False, reduce_dtype=torch.bfloat16, "
            "ignore=frozenset({'net.0.bias'}), timeout_seconds=90.0, checks=Checks(nonfinite='raise')"
        )
        assert told["kept"]  # init_sync=False
    assert first["drawn"] != second["drawn"]


def test_ranks_end_with_the_batch_norm_statistics_of_rank_0_which_a_checkpoint_holds(left: Any) -> None:
    first, second = left("normed_to_the_end")

    assert_same_bits(first, left("normed_to_the_end", "ddp")[0])
    assert_same_bits(second, first)
    assert_same_bits(first["saved"], first["state"])


def test_a_training_resumed_from_a_checkpoint_is_the_one_that_was_not_interrupted(left: Any) -> None:
    ours = left("resumed")

    assert_same_bits(ours, left("resumed", "ddp"))
    assert_same_bits(ours[0]["resumed"], ours[0]["whole"])
    assert_same_bits(ours[0]["saved"], ours[0]["first"])  # no prefix in its keys
    assert not torch.equal(ours[0]["first"]["net.0.weight"], ours[0]["whole"]["net.0.weight"])


def test_after_fit_the_module_is_unwrapped_and_steps_alone_and_fits_again(left: Any) -> None:
    ours = left("fitted_twice")

    assert [told["unwrapped"] for told in ours] == [True, True]
    assert_same_bits(ours, left("fitted_twice", "ddp"))


def test_what_does_not_go_together_is_refused_as_under_ddp(left: Any) -> None:
    assert left("refused") == left("refused", "ddp")


def test_a_backward_that_bypasses_lightning_is_an_error_of_the_optimizer(left: Any) -> None:
    for told in left("forgetting"):
        assert told["error"].startswith("step() of AdamW would use gradients that were not reduced"), told
        assert "replace loss.backward() by self.manual_backward(loss)" in told["notes"][1]


def test_an_error_that_all_ranks_agree_on_reaches_each_of_them_and_leaves_the_job_usable(left: Any) -> None:
    first, second = left("not_finite")

    assert first == second
    assert first["ranks"] == (1,)
    assert "non-finite" in first["error"]
    assert left("hooked")  # trained after it in the same processes


@pytest.mark.thorough
def test_the_example_learns_the_digits() -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

    result = run_script(str(EXAMPLES / "lightning_digits.py"), "--epochs", "4")

    assert result.returncode == 0, result.stderr
    (name, accuracy) = result.stdout.split()  # one line, of one rank
    assert name == "accuracy"
    assert float(accuracy) > 0.93
