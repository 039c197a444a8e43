"""Signatures: every change of the parameters that a plan depends on is noticed, and no other change."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.utils import swap_tensors

from legacy_ddp._buckets import plan as signature_module
from legacy_ddp._buckets.plan import Signature, columns
from tests.helpers.torch_versions import needs_grad_dtype

Named = list[tuple[str, torch.Tensor]]


def _named() -> Named:
    tied = nn.Parameter(torch.ones(3))
    return [("a", nn.Parameter(torch.ones(2, 2))), ("b", tied), ("c", tied), ("d", nn.Parameter(torch.ones(4, 1)))]


def _set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    tensor.data = data


class _Subclass(nn.Parameter):
    pass


def _change_class(tensor: torch.Tensor) -> None:
    tensor.__class__ = _Subclass


CHANGES: dict[str, Callable[[Named], object]] = {
    "another name": lambda named: named.__setitem__(0, ("e", named[0][1])),
    "another tensor": lambda named: named.__setitem__(0, ("a", nn.Parameter(torch.ones(2, 2)))),
    "one more": lambda named: named.append(("e", nn.Parameter(torch.ones(1)))),
    "one less": lambda named: named.pop(),
    "another order": lambda named: named.reverse(),
    "untied": lambda named: named.__setitem__(2, ("c", nn.Parameter(torch.ones(3)))),
    "tied": lambda named: named.__setitem__(0, ("a", named[1][1])),
    "frozen": lambda named: named[0][1].requires_grad_(False),
    "dtype": lambda named: _set_data(named[0][1], torch.ones(2, 2).double()),
    "device": lambda named: swap_tensors(named[0][1], nn.Parameter(torch.ones(2, 2, device="meta"))),
    "shape": lambda named: _set_data(named[0][1], named[0][1].data.view(4)),
    "shape, same elements in a row": lambda named: _set_data(named[3][1], named[3][1].data.view(1, 4)),
    "strides": lambda named: _set_data(named[0][1], named[0][1].data.t()),
    "gradient's dtype": lambda named: setattr(named[0][1], "grad_dtype", torch.float64),
    "class": lambda named: _change_class(named[0][1]),
    "lazy": lambda named: named.__setitem__(0, ("a", UninitializedParameter())),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_grad_dtype) if name == "gradient's dtype" else name for name in CHANGES]
)
def test_change_is_noticed(name: str) -> None:
    named = _named()
    signature = Signature(*columns(named))

    CHANGES[name](named)

    assert not signature.matches(*columns(named))


MOMENTS: dict[str, Callable[[], object]] = {
    "as it was": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_same_parameters_at_another_moment_are_the_same(name: str) -> None:
    named = _named()
    signature = Signature(*columns(named))

    with MOMENTS[name]():  # type: ignore[attr-defined]
        assert signature.matches(*columns(named))
        assert signature.matches(*columns(named))
        assert not signature.matches(*columns(_named()))
    assert signature.matches(*columns(named))


def test_values_gradients_and_versions_do_not_matter() -> None:
    named = _named()
    signature = Signature(*columns(named))

    with torch.no_grad():
        named[0][1].mul_(2)
    named[0][1].sum().backward()
    named[1][1].data = torch.zeros(3)

    assert signature.matches(*columns(named))


def test_lazy_parameter_that_gets_its_shape_is_a_change_and_one_that_does_not_hides_none() -> None:
    lazy = UninitializedParameter()
    named = [*_named(), ("lazy", lazy)]
    signature = Signature(*columns(named))
    assert signature.matches(*columns(named))

    lazy.materialize((2,))
    assert not signature.matches(*columns(named))

    named = [*_named(), ("lazy", UninitializedParameter())]
    signature = Signature(*columns(named))
    named[0][1].requires_grad_(False)
    assert not signature.matches(*columns(named))


def test_no_parameters_at_all() -> None:
    signature = Signature([], [])

    assert signature.matches([], [])
    assert not signature.matches(*columns(_named()))


def test_tied_parameters_are_compared_as_quickly_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    named = _named()
    signature = Signature(*columns(named))
    monkeypatch.setattr(signature_module, "_facts", lambda _: pytest.fail("asked each parameter for everything"))

    assert signature.matches(*columns(named))
