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

    assert [a == b for a, b in zip(first, second, strict=True)] == [False] * 3 + [True] + [False] * 3 + [
        True,
        False,
        False,
        True,
    ]


def test_ranks_meet_once_per_step_and_not_while_batches_accumulate(left: Any) -> None:
    assert left("counted") == [{"calls": 3}] * 2  # 11 batches, windows of 4


def test_the_process_group_has_the_backend_and_the_timeout_that_were_asked_for(left: Any) -> None:
    assert left("first_group") == [{"backend": "gloo", "timeout": timedelta(seconds=90)}] * 2


def test_training_in_bf16_is_that_of_ddp(left: Any) -> None:
    assert_same_bits(left("in_bf16"), left("in_bf16", "ddp"))


def test_a_step_that_overflows_in_fp16_on_one_rank_is_skipped_on_all_as_by_ddp(left: Any) -> None:
    ours = left("in_fp16")

    assert_same_bits(ours, left("in_fp16", "ddp"))
    assert [told["scale"] for told in ours] == [2.0**15] * 2  # half of what it began with: one step was skipped


def test_training_begins_with_the_weights_of_rank_0(left: Any) -> None:
    ours = left("different_starts")
    first, second = (told.pop("drawn") for told in ours)

    assert first != second
    assert_same_bits(ours[0], ours[1])
    assert_same_bits(
        ours[0], {key: value for key, value in left("different_starts", "ddp")[0].items() if key != "drawn"}
    )


def test_arguments_of_the_wrapper_reach_it(left: Any) -> None:
    first, second = left("configured")

    for told in (first, second):
        assert told["settings"] == (
            "buffer_size=7, gradient_as_bucket_view=False, reduce_dtype=torch.bfloat16, "
            "ignore=frozenset({'net.0.bias'}), timeout_seconds=90.0, checks=Checks(nonfinite='raise')"
        )
        assert told["kept"]  # init_sync=False
    assert first["drawn"] != second["drawn"]


def test_batch_norm_is_validated_with_the_statistics_that_ddp_has(left: Any) -> None:
    assert_same_bits(left("normed"), left("normed", "ddp"))


def test_ranks_end_with_the_batch_norm_statistics_of_rank_0_which_a_checkpoint_holds(left: Any) -> None:
    first, second = left("normed_to_the_end")

    assert_same_bits(first, left("normed_to_the_end", "ddp")[0])
    assert_same_bits(second, first)
    assert_same_bits(first["saved"], first["state"])


def test_two_optimizers_by_hand_leave_what_ddp_leaves(left: Any) -> None:
    assert_same_bits(left("adversaries"), left("adversaries", "ddp"))


def test_batches_accumulated_by_hand_leave_what_lightning_leaves(left: Any) -> None:
    assert_same_bits(left("by_hand"), left("by_hand", "ddp"))


def test_a_layer_that_no_loss_reaches_stays_where_it_is_as_when_ddp_searches_for_it(left: Any) -> None:
    assert_same_bits(left("unused"), left("unused", "ddp"))


def test_an_optimizer_that_is_split_over_ranks_leaves_what_it_leaves_under_ddp(left: Any) -> None:
    assert_same_bits(left("sharded"), left("sharded", "ddp"))


def test_a_training_resumed_from_a_checkpoint_is_the_one_that_was_not_interrupted(left: Any) -> None:
    ours = left("resumed")

    assert_same_bits(ours, left("resumed", "ddp"))
    assert_same_bits(ours[0]["resumed"], ours[0]["whole"])
    assert_same_bits(ours[0]["saved"], ours[0]["first"])  # no prefix in its keys
    assert not torch.equal(ours[0]["first"]["net.0.weight"], ours[0]["whole"]["net.0.weight"])


def test_validate_test_and_predict_give_what_they_give_under_ddp(left: Any) -> None:
    assert_same_bits(left("evaluated"), left("evaluated", "ddp"))


def test_after_fit_the_module_is_unwrapped_and_steps_alone_and_fits_again(left: Any) -> None:
    ours = left("fitted_twice")

    assert [told["unwrapped"] for told in ours] == [True, True]
    assert_same_bits(ours, left("fitted_twice", "ddp"))


def test_collectives_of_the_strategy_answer_as_those_of_ddp(left: Any) -> None:
    assert_same_bits(left("collectives"), left("collectives", "ddp"))


def test_sync_batchnorm_is_refused_on_cpu_as_by_ddp(left: Any) -> None:
    for strategy in ("legacy_ddp", "ddp"):
        assert ["GPU" in told["error"] for told in left("sync_batchnorm", strategy)] == [True, True]


def test_a_communication_hook_and_its_wrapper_leave_what_they_leave_under_ddp(left: Any) -> None:
    assert_same_bits(left("hooked"), left("hooked", "ddp"))


def test_local_steps_with_averaged_weights_leave_what_they_leave_under_ddp(left: Any) -> None:
    assert_same_bits(left("local_sgd"), left("local_sgd", "ddp"))


def test_averaged_weights_do_not_go_with_an_optimizer_that_is_split_as_under_ddp(left: Any) -> None:
    ours = left("averaging_of_sharded")

    assert_same_bits(ours, left("averaging_of_sharded", "ddp"))
    assert "ZeroRedundancyOptimizer" in ours[0]["error"]


def test_a_backward_that_bypasses_lightning_is_an_error_of_the_optimizer(left: Any) -> None:
    for told in left("forgetting"):
        assert told["error"].startswith("step() of AdamW would use gradients that were not reduced"), told
        assert "replace loss.backward() by self.manual_backward(loss)" in told["notes"][1]


def test_an_error_that_all_ranks_agree_on_reaches_each_of_them_and_leaves_the_job_usable(left: Any) -> None:
    first, second = left("not_finite")

    assert first == second
    assert first["ranks"] == (1,)
    assert "non-finite" in first["error"]
    assert left("counted")  # trained after it in the same processes


@pytest.mark.thorough
def test_the_example_learns_the_digits() -> None:
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")

    result = run_script(str(EXAMPLES / "lightning_digits.py"), "--epochs", "4")

    assert result.returncode == 0, result.stderr
    (name, accuracy) = result.stdout.split()  # one line, of one rank
    assert name == "accuracy"
    assert float(accuracy) > 0.93
