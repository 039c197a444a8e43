"""Fabric: strategy ``legacy_ddp`` gives the weights of strategy ``ddp``, with the same loop."""

from typing import Any

import pytest

from tests.helpers.lightning_scenarios import by_fabric, needs_lightning
from tests.helpers.scripts import assert_same_bits

pytestmark = needs_lightning


@pytest.fixture(name="left", scope="module")
def what_the_ranks_left() -> Any:
    return by_fabric()


def test_clipped_steps_of_several_batches_are_those_of_ddp(left: Any) -> None:
    assert_same_bits(left("accumulating"), left("accumulating", "ddp"))


def test_arguments_of_the_wrapper_reach_it(left: Any) -> None:
    first, second = left("configured")

    for told in (first, second):
        assert told["settings"] == (
            "buffer_size=7, gradient_as_bucket_view=False, reduce_dtype=torch.bfloat16, "
            "ignore=frozenset({'0.bias'}), timeout_seconds=90.0, checks=Checks(nonfinite='raise')"
        )
        assert told["kept"]  # init_sync=False
    assert first["drawn"] != second["drawn"]


def test_a_communication_hook_leaves_what_it_leaves_under_ddp(left: Any) -> None:
    assert_same_bits(left("hooked"), left("hooked", "ddp"))


def test_training_in_bf16_is_that_of_ddp(left: Any) -> None:
    assert_same_bits(left("in_bf16"), left("in_bf16", "ddp"))


def test_a_checkpoint_has_the_keys_of_the_plain_module_and_loads_again(left: Any) -> None:
    ours = left("checkpoint")

    assert_same_bits(ours, left("checkpoint", "ddp"))
    assert_same_bits(ours[0]["saved"], ours[0]["loaded"])
    assert set(ours[0]["saved"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_batch_norm_is_evaluated_with_the_statistics_that_ddp_has_after_broadcast_buffers(left: Any) -> None:
    assert_same_bits(left("normed"), left("normed", "ddp"))


def test_two_models_leave_what_they_leave_under_ddp(left: Any) -> None:
    assert_same_bits(left("adversaries"), left("adversaries", "ddp"))


def test_backward_for_one_model_leaves_the_gradients_of_the_other_to_their_rank(left: Any) -> None:
    assert left("chosen_model") == [{"gradients": [1.5, 1.0]}, {"gradients": [1.5, 2.0]}]  # means of 1 and 2; 1 | 2


def test_a_model_that_one_rank_has_dropped_already_disturbs_no_other(left: Any) -> None:
    assert left("out_of_use") == [{"gradient": 1.5}] * 2


def test_a_rank_whose_loss_does_not_reach_the_model_counts_as_zeros(left: Any) -> None:
    assert left("without_data") == [{"gradient": 2.0}] * 2


def test_a_backward_that_bypasses_fabric_is_an_error(left: Any) -> None:
    for told in left("by_hand"):
        assert "fabric.backward(loss)" in told["error"]


def test_no_backward_sync_of_a_model_of_another_strategy_is_an_error(left: Any) -> None:
    for told in left("not_set_up"):
        assert told["error"].startswith("no_backward_sync() got a DistributedDataParallel"), told


def test_a_loop_can_make_the_call_itself_and_say_over_how_many_items(left: Any) -> None:
    assert left("own_call") == [{"gradient": 1.0, "sample_size": 3}] * 2  # (1 + 2) / (1 + 2)


def test_the_page_s_loop_makes_a_call_per_window_and_leaves_ranks_alike(left: Any) -> None:
    first, second = left("of_the_page")

    assert_same_bits(first, second)
    assert first["calls"] == 2
