"""Fabric: strategy ``legacy_ddp`` gives the weights of strategy ``ddp``, with the same loop."""

from typing import Any

import pytest

from tests.helpers.lightning_scenarios import by_fabric, needs_lightning
from tests.helpers.scripts import assert_same_bits

pytestmark = needs_lightning


@pytest.fixture(name="left", scope="module")
def what_the_ranks_left() -> Any:
    return by_fabric()


@pytest.mark.parametrize("story", ["accumulating", "adversaries", "hooked", "normed"])
def test_what_fabric_offers_leaves_what_it_leaves_under_ddp(left: Any, story: str) -> None:
    assert_same_bits(left(story), left(story, "ddp"))


def test_a_checkpoint_has_the_keys_of_the_plain_module_and_loads_again(left: Any) -> None:
    ours = left("checkpoint")

    assert_same_bits(ours, left("checkpoint", "ddp"))
    assert_same_bits(ours[0]["saved"], ours[0]["loaded"])
    assert set(ours[0]["saved"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_backward_for_one_model_leaves_the_gradients_of_the_other_to_their_rank(left: Any) -> None:
    assert left("chosen_model") == [{"gradients": [1.5, 1.0]}, {"gradients": [1.5, 2.0]}]  # means of 1 and 2; 1 | 2


def test_a_model_that_one_rank_has_dropped_already_disturbs_no_other(left: Any) -> None:
    assert left("out_of_use") == [{"gradient": 1.5}] * 2


def test_a_rank_whose_loss_does_not_reach_the_model_counts_as_zeros(left: Any) -> None:
    assert [told["gradient"] for told in left("without_data")] == [2.0, 2.0]


def test_arguments_of_the_wrapper_reach_it(left: Any) -> None:
    assert ["timeout_seconds=90.0" in told["settings"] for told in left("without_data")] == [True, True]


def test_a_backward_that_bypasses_fabric_and_a_model_of_another_strategy_are_errors(left: Any) -> None:
    for told in left("misused"):
        assert "fabric.backward(loss)" in told["by hand"]
        assert told["not set up"].startswith("no_backward_sync() got a DistributedDataParallel"), told


def test_a_loop_can_make_the_call_itself_and_say_over_how_many_items(left: Any) -> None:
    assert left("own_call") == [{"gradient": 1.0, "sample_size": 3}] * 2  # (1 + 2) / (1 + 2)


def test_the_page_s_loop_makes_a_call_per_window_and_leaves_ranks_alike(left: Any) -> None:
    first, second = left("of_the_page")

    assert_same_bits(first, second)
    assert first["calls"] == 2
