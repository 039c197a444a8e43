"""Number of collectives per bucket; every element is divided once."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp._collectives import dense
from legacy_ddp._transport.call import Call
from tests.helpers.ranks import run_ranks


def _reduce_once(smallest_bytes: int, numel: int, options: dict[str, Any], rank: int) -> tuple[int, int, list[float]]:
    """Collectives, bytes handed over, and the mean of ones and threes."""
    dense.SMALLEST_PIECE_BYTES = smallest_bytes
    net = nn.ParameterList([nn.Parameter(torch.zeros(numel - 2)), nn.Parameter(torch.zeros(2))])
    wrapped = LegacyDistributedDataParallel(net, checks="off", **options)
    for parameter in net:
        parameter.grad = torch.full_like(parameter, 1.0 + 2 * rank)
    groups: list[Any] = []
    start = Call.start

    def noted(call: Call, group: Any, begin: Any) -> Any:
        groups.append(group)
        return start(call, group, begin)

    Call.start = noted  # type: ignore[method-assign]
    record = wrapped.all_reduce()
    return len(groups), record.payload_bytes, torch.cat([parameter.grad for parameter in net]).unique().tolist()


@pytest.mark.parametrize(
    "smallest_bytes,numel,options,pieces",
    [
        (16, 8, {}, 2),
        (16, 9, {}, 2),
        (16, 7, {}, 2),  # 4 and 3
        (32, 8, {}, 1),  # a half would be too small
        (20, 9, {}, 2),
        (16, 100, {}, 2),  # never more than two
        (16, 12, {"buffer_size": 5}, 3),
        (16, 12, {"buffer_size": 100}, 2),
        (16, 12, {"reduce_dtype": torch.bfloat16}, 2),  # 8 and 4: what travels is counted
    ],
)
@pytest.mark.parametrize("transport", ["gloo"], indirect=True)
def test_a_large_bucket_travels_in_two_halves(
    transport: str, smallest_bytes: int, numel: int, options: dict[str, Any], pieces: int
) -> None:
    size_bytes = numel * (2 if "reduce_dtype" in options else 4)

    assert (
        run_ranks(partial(_reduce_once, smallest_bytes, numel, options), 2, fresh=True)
        == [(pieces, size_bytes, [2.0])] * 2
    )
