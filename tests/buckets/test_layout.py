"""Layouts: every gradient has the same place on every rank with the same names."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from legacy_ddp._buckets.layout import Bucket, Layout, Slot, cut_runs, distinct, plan_layout
from legacy_ddp._settings import Settings


def _plan(*named: tuple[str, torch.Tensor]) -> Layout:
    return plan_layout(distinct(named), Settings())


def _parameter(*shape: int, dtype: torch.dtype = torch.float32, trainable: bool = True) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=trainable)


def _bucket(*numels: int) -> Bucket:
    offsets = [sum(numels[:index]) for index in range(len(numels))]
    slots = [Slot(f"p{i}", torch.Size([n]), (1,), o, n) for i, (n, o) in enumerate(zip(numels, offsets, strict=True))]
    return Bucket(torch.device("cpu"), torch.float32, tuple(slots), sum(numels))


def test_slots_follow_each_other_in_name_order() -> None:
    (bucket,) = _plan(("b", _parameter(2, 3)), ("a", _parameter(4)), ("c", _parameter())).buckets

    assert [(slot.name, slot.offset, slot.numel) for slot in bucket.slots] == [("a", 0, 4), ("b", 4, 6), ("c", 10, 1)]
    assert bucket.numel == 11


def test_the_order_of_registration_does_not_matter() -> None:
    named = [("b", _parameter(2)), ("a", _parameter(2, dtype=torch.float64)), ("c", _parameter(2, trainable=False))]

    assert _plan(*named).fingerprint == _plan(*reversed(named)).fingerprint


def test_every_dtype_has_a_bucket_of_its_own() -> None:
    layout = _plan(("a", _parameter(2, dtype=torch.bfloat16)), ("b", _parameter(2)), ("c", _parameter(1)))

    assert [(bucket.dtype, bucket.numel) for bucket in layout.buckets] == [(torch.bfloat16, 2), (torch.float32, 3)]


def test_a_tied_parameter_has_one_slot_under_its_smallest_name() -> None:
    tied = _parameter(2)
    layout = _plan(("z.weight", tied), ("a.weight", tied))

    assert [slot.name for slot in layout.slots] == ["a.weight"]
    assert "shared with z.weight" in layout.inventory["parameter 'a.weight'"]


@pytest.mark.parametrize(
    "change",
    [
        ("p", _parameter(3)),
        ("p", _parameter(2, dtype=torch.float64)),
        ("p", _parameter(2, trainable=False)),
        ("q", _parameter(2)),
    ],
)
def test_any_difference_shows_in_the_fingerprint(change: tuple[str, torch.Tensor]) -> None:
    assert _plan(change).fingerprint != _plan(("p", _parameter(2))).fingerprint


def test_settings_that_ranks_must_share_show_in_the_fingerprint() -> None:
    parameters = distinct([("p", _parameter(2))])
    prints = {
        plan_layout(parameters, settings).fingerprint
        for settings in (Settings(), Settings(buffer_size=5), Settings(reduce_dtype=torch.bfloat16))
    }
    assert len(prints) == 3


def test_devices_are_numbered_by_order_and_not_by_index() -> None:
    def layout(first: int) -> Layout:
        with FakeTensorMode():  # torch's own stand-in for tensors on devices that this machine lacks
            devices = [f"cuda:{first}", f"cuda:{first + 1}", f"cuda:{first}"]
            tensors = [torch.zeros(2, device=device, requires_grad=True) for device in devices]
        return _plan(*((f"p{i}", tensor) for i, tensor in enumerate(tensors)))

    assert layout(0).fingerprint == layout(4).fingerprint
    assert [len(bucket.slots) for bucket in layout(4).buckets] == [2, 1]
    assert "on cuda#1" in layout(4).inventory["parameter 'p1'"]


@pytest.mark.parametrize("names", [{"a"}, {"b"}, {"a", "b"}])
def test_ignoring_one_name_of_a_tied_parameter_ignores_it(names: set[str]) -> None:
    tied = _parameter(2)

    assert [item.name for item in distinct([("a", tied), ("b", tied), ("c", _parameter(1))], names)] == ["c"]


@pytest.mark.parametrize(
    "tensor, words",
    [
        (nn.parameter.UninitializedParameter(), "is not initialised yet"),
        (nn.Parameter(torch.zeros(2, device="meta")), "is on the meta device"),
        (nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn)), "dtype torch.float8_e4m3fn"),
        (torch.zeros(2, requires_grad=True) * 2, "is computed from other tensors"),
    ],
)
def test_a_parameter_without_a_place_is_named(tensor: torch.Tensor, words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        _plan(("layer.weight", tensor))
    assert "parameter 'layer.weight'" in str(caught.value)


def test_a_frozen_parameter_may_have_any_dtype() -> None:
    assert _plan(("p", _parameter(2, dtype=torch.uint8, trainable=False))).buckets == ()


@pytest.mark.parametrize(
    "present, max_gap, runs",
    [
        ([1, 1, 1, 1], 0, [(0, 10)]),
        ([1, 0, 1, 1], 0, [(0, 1), (3, 10)]),
        ([1, 0, 1, 1], 2, [(0, 10)]),
        ([1, 0, 0, 1], 4, [(0, 1), (6, 10)]),
        ([1, 0, 0, 1], 5, [(0, 10)]),
        ([0, 1, 0, 0], 9, [(1, 3)]),
        ([0, 0, 0, 0], 9, []),
    ],
)
def test_runs_join_present_slots_over_small_gaps(present: list[int], max_gap: int, runs: list[tuple[int, int]]) -> None:
    assert _bucket(1, 2, 3, 4).runs([bool(p) for p in present], max_gap=max_gap) == runs


def test_an_empty_slot_starts_no_run() -> None:
    assert _bucket(2, 0, 2).runs([False, True, False]) == []


def test_long_runs_are_cut() -> None:
    assert cut_runs([(0, 5), (7, 9)], max_numel=2) == [(0, 2), (2, 4), (4, 5), (7, 9)]
