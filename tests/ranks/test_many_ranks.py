"""What a mismatch costs a rank of a job of many ranks: the bytes that it receives, counted with 1,024 ranks."""

from functools import partial
from typing import Any

import pytest
import torch

from legacy_ddp import AgreedError, LayoutError, PeerError
from legacy_ddp._memory.layout import Named, build_inventory, inventory_digest
from legacy_ddp._ranks.agree import agree, announcing_failures
from legacy_ddp._ranks.call import Call
from legacy_ddp._ranks.header import Header
from tests.helpers.many_ranks import run_kinds

RANKS, TENSORS = 1024, 2000
HEADERS = (128 + 56) * RANKS  # bytes, with the segments of each rank
CARDS = 16 * RANKS  # a fingerprint and a length of 8 bytes each


def _inventory(kind: int) -> dict[str, str]:
    """Of ``TENSORS`` parameters; kind 1 has a wider dtype in one of them, kind 2 lacks another."""
    tensors = [
        Named((f"model.layers.{i}.self_attn.q_proj.weight",), torch.zeros(2, 2, dtype=torch.float32))
        for i in range(TENSORS)
    ]
    if kind == 1:
        tensors[7] = Named(tensors[7].names, torch.zeros(2, 2, dtype=torch.float64))
    if kind == 2:
        del tensors[9]
    return build_inventory(tensors, kind="parameter")


def _announce(call: Call, error: Exception) -> None:
    with announcing_failures(call):
        raise error


def _raised(call: Call, kind: int) -> AgreedError:
    inventory = _inventory(kind)
    with pytest.raises(LayoutError) as caught:
        agree(call, Header(layout=inventory_digest(inventory)), inventory)
    return caught.value


@pytest.mark.parametrize("ranks", [16, RANKS])
def test_a_layout_error_brings_each_rank_the_distinct_inventories_and_a_few_bytes_of_every_rank(ranks: int) -> None:
    kinds = [0] * ranks
    kinds[3], kinds[11] = 1, 2

    outcomes = run_kinds(kinds, _raised)

    texts = {str(error) for error, _ in outcomes}
    (text,) = texts
    assert "parameter 'model.layers.7.self_attn.q_proj.weight': rank 3 has float64" in text
    assert "parameter 'model.layers.9.self_attn.q_proj.weight': rank 11 has nothing" in text
    assert {error.ranks for error, _ in outcomes} == {(3, 11)}
    held = max(sum(len(name) + len(value) + 8 for name, value in _inventory(kind).items()) for kind in range(3))
    for _, received in outcomes:
        assert 3 * 0.9 * held < received - (128 + 56 + 16) * ranks < 3 * 1.1 * held


def test_equal_texts_of_failures_on_1024_ranks_are_sent_once() -> None:
    text = "x" * 7000

    def fail(call: Call, kind: int) -> str:
        action = partial(_announce, call, ValueError(text)) if kind else partial(agree, call, Header(), {})
        with pytest.raises(PeerError) as caught:
            action()
        return str(caught.value)

    outcomes = run_kinds([0] + [1] * (RANKS - 1), fail)

    (said,) = {said for said, _ in outcomes}
    assert "ranks 1-1023 failed" in said
    assert said.count(f"ValueError: {text}") == RANKS - 1  # the text names every rank, as with few ranks
    assert {received - HEADERS - CARDS for _, received in outcomes} == {len('""') + len(f'"ValueError: {text}"')}


@pytest.mark.parametrize("kinds", [[0], [0, 0, 0], [0, 1, 2, 3, 4], [2, 0, 1, 0, 2, 2]])
def test_every_rank_gets_the_value_of_every_rank_in_order_whatever_values_are_equal(kinds: list[int]) -> None:
    values: list[Any] = [{"a": [1, None]}, "", "\udcff \N{SNOWMAN}", [0.5, "x" * 100], {"a": [1, 0]}]

    outcomes = run_kinds(kinds, lambda call, kind: call.gather_objects(values[kind]))

    assert [found for found, _ in outcomes] == [[values[kind] for kind in kinds]] * len(outcomes)
