"""A run has the batch as it was: values, containers, dtypes and strides. A single rank sends the batch to itself."""

import math
import re
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from legacy_ddp.debug import cross_check

pytestmark = pytest.mark.usefixtures("alone")


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Sample:
    windows: torch.Tensor
    name: str
    extra: Any = None


def _sent(batch: Any) -> Any:
    received = []

    def run(model: nn.Module, batch: Any) -> torch.Tensor:
        received.append(batch)
        loss: torch.Tensor = model(torch.ones(1, 1)).sum()
        return loss

    assert cross_check(nn.Linear(1, 1), run, batch).agrees
    return received[-1]


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=())),
    st.binary(),
)
_KEYS = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
_NESTED = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(_KEYS, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4).map(OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Pair(*pair)),
    ),
    max_leaves=12,
)


def test_any_nesting_of_numbers_and_texts_arrives_as_it_was() -> None:
    @given(_NESTED)
    def check(batch: Any) -> None:
        (sent,) = _sent([batch])  # None would be no batch

        assert repr(sent) == repr(batch)  # with types, and the sign of zero
        assert type(sent) is type(batch)

    check()


def test_a_tensor_keeps_bits_shape_dtype_and_strides() -> None:
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]
    shapes = st.lists(st.integers(0, 4), max_size=3)

    @given(st.sampled_from(dtypes), shapes, st.permutations(range(3)), st.booleans(), st.booleans())
    def check(dtype: torch.dtype, shape: list[int], order: list[int], is_sliced: bool, is_expanded: bool) -> None:
        tensor = torch.arange(math.prod(shape) * 2).to(dtype).reshape(*shape, 2)
        if len(shape) == 2:
            tensor = tensor.permute(order)
        if is_sliced:
            tensor = tensor[..., 1:]
        if is_expanded:
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)

        (sent,) = _sent([tensor])

        assert (sent.dtype, sent.shape, sent.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
        assert torch.equal(sent, tensor)
        assert not sent.numel() or sent.data_ptr() != tensor.data_ptr()

    check()


def test_overlapping_conjugate_and_channels_last_tensors_arrive() -> None:
    windows = torch.arange(10.0).unfold(0, 4, 1)
    images = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    nan = torch.tensor([float("nan"), -0.0])

    sent = _sent({"a": windows, "b": images, "c": conjugate, "d": nan})

    assert torch.equal(sent["a"], windows)
    assert sent["a"].stride() == windows.stride()
    assert sent["b"].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(sent["c"], conjugate)
    assert torch.equal(sent["d"].view(torch.int32), nan.view(torch.int32))


def test_requires_grad_travels_and_the_batch_stays_as_it_was() -> None:
    inputs = torch.ones(3, requires_grad=True)

    (sent,) = _sent([inputs])
    sent.sum().backward()

    assert sent.is_leaf
    assert inputs.grad is None


def test_named_tuples_dataclasses_and_mappings_are_made_again() -> None:
    batch = Pair(Sample(torch.ones(2), "a", [1]), UserDict({"x": torch.zeros(1)}))

    sent = _sent(batch)

    assert type(sent) is Pair
    assert (type(sent.left), sent.left.name, sent.left.extra) == (Sample, "a", [1])
    assert torch.equal(sent.left.windows, torch.ones(2))
    assert type(sent.right) is UserDict
    assert torch.equal(sent.right["x"], torch.zeros(1))


@dataclass
class _Derived:
    size: int = field(init=False, default=0)


@pytest.mark.parametrize(
    "batch, text",
    [
        ([{1, 2}], "batch[0] is of a type that cannot be sent to another rank: got a set"),
        (Pair(1, object()), "batch.right is of a type"),
        ({object(): 1}, "batch has a key that cannot be sent to another rank: got a object"),
        ([torch.nn.Parameter(torch.ones(1))], "batch[0] cannot be sent to another rank: got a Parameter"),
        ([torch.ones(2).to_sparse()], "batch[0] cannot be sent to another rank: got a sparse or nested tensor"),
        ([torch.ones(2, device="meta")], "batch[0] cannot be sent to another rank: got a tensor that is quantized"),
        ([torch.ones(2).requires_grad_() * 2], "batch[0] cannot be sent to another rank: got a tensor with a grad_fn"),
        (_Derived(), "batch is of a type that cannot be sent"),
        (lambda: 1, "batch is of a type that cannot be sent to another rank: got a function"),
    ],
)
def test_a_value_that_cannot_be_sent_is_named_by_its_place(batch: Any, text: str) -> None:
    with pytest.raises(TypeError, match=re.escape(text)):
        _sent(batch)


def test_a_batch_that_contains_itself_is_named_by_its_place() -> None:
    batch: dict[str, Any] = {"items": [1]}
    batch["items"].append(batch)

    with pytest.raises(ValueError, match=r"batch contains itself, at batch\['items'\]\[1\]: expected"):
        _sent(batch)


def _nested(depth: int) -> Any:
    return [_nested(depth - 1)] if depth else 1


def test_a_batch_nested_too_deeply_is_no_recursion_error() -> None:
    assert _sent(_nested(100)) == _nested(100)
    with pytest.raises(ValueError, match="batch is nested too deeply: expected at most 100 containers"):
        _sent(_nested(101))


def test_one_object_at_two_places_is_no_cycle() -> None:
    part = [1, 2]

    assert _sent([part, (part, part)]) == [part, (part, part)]
