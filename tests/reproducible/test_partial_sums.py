"""Partial sums of the leaves of a bucket: the bits of the tree in the dtype of the sums."""

import pytest
import torch

from legacy_ddp._buckets.layout import Bucket
from legacy_ddp._buckets.segment import SegmentPolicy
from legacy_ddp._reproducible import partial_sums
from legacy_ddp._reproducible.partial_sums import PartialSums
from tests.helpers.reference_tree import tree_sum

CHUNK = partial_sums._CONVERTED_NUMEL


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("numel", [0, 1, CHUNK - 1, CHUNK, 2 * CHUNK + 3])
def test_leaves_of_any_size_are_added_in_the_order_of_the_tree(numel: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(numel)
    leaves = [(1000 * torch.randn(numel, generator=generator)).to(dtype) for _ in range(7)]
    sums = PartialSums(Bucket(torch.device("cpu"), dtype, (), numel), SegmentPolicy())
    wide = torch.float32 if dtype == torch.float16 else dtype

    for count, leaf in enumerate(leaves, 1):
        expected = tree_sum([each.to(wide) for each in leaves[:count]])
        assert torch.equal(sums.total(leaf), expected)
        sums.add(leaf)
        assert torch.equal(sums.total(None), expected)
