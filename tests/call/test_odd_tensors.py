"""Quantized tensors are exchanged and compared by their bits; a tensor that cannot be is refused or listed by name."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from legacy_ddp import LayoutError, LegacyDistributedDataParallel, ReplicaDivergenceError
from legacy_ddp.debug import check_replicas
from legacy_ddp.debug import digest as digest_of
from tests.helpers import logged_warnings
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import error_of

pytestmark = pytest.mark.cpu("only the CPU has quantized tensors")

_ROTATION = 16  # calls in which every byte is compared once
_ADVICE = "; list it in ignore="


def _quantize(function: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will remove these tensors
        return function(*arguments)


def _quantized(values: list[float], scale: float = 0.5, zero_point: int = 0) -> torch.Tensor:
    return _quantize(torch.quantize_per_tensor, torch.tensor(values), scale, zero_point, torch.qint8)


def _by_channel(first: float, scales: list[float]) -> torch.Tensor:
    values, zeros = torch.tensor([[first, 2.0], [3.0, 4.0]]), torch.zeros(2, dtype=torch.long)
    return _quantize(torch.quantize_per_channel, values, torch.tensor(scales), zeros, 0, torch.qint8)


def _packed() -> torch.Tensor:
    return _quantize(torch.quantize_per_channel, torch.ones(2, 4), torch.ones(2), torch.zeros(2), 0, torch.quint4x2)


class _Adapted(nn.Module):
    """A layer on frozen quantized weights, as of a model with adapters."""

    base: torch.Tensor
    table: torch.Tensor
    channels: torch.Tensor

    def __init__(self, value: float, scale: float = 1.0) -> None:
        super().__init__()
        self.adapter = nn.Linear(2, 1)
        self.base = nn.Parameter(_quantized([value, 2.0], 0.5 * scale, 1), requires_grad=False)
        self.register_buffer("table", _quantized([value + 1, 5.0], 0.25 * scale))
        self.register_buffer("channels", _by_channel(value, [0.5, scale]))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.adapter(inputs * self.base.dequantize())
        return output


@on_ranks(2, [([1.0, 2.0], [2.0, 5.0], [[1.0, 2.0], [3.0, 4.0]])] * 2)
def test_quantized_tensors_of_several_scales_are_those_of_rank_0(rank: int) -> Any:
    module = LegacyDistributedDataParallel(_Adapted(1.0 + 2 * rank)).module
    return tuple(tensor.dequantize().tolist() for tensor in (module.base, module.table, module.channels))


@on_ranks(2, [(True, [1.0, 2.0])] * 2)
def test_another_scale_on_one_rank_is_named_and_nothing_is_written(rank: int) -> tuple[bool, list[float]]:
    module = _Adapted(1.0, 1.0 + rank)
    with pytest.raises(LayoutError) as caught:
        LegacyDistributedDataParallel(module)
    LegacyDistributedDataParallel(nn.Linear(1, 1))  # the group is still usable
    told = "parameter 'base': rank 1 has qint8 (2,) on cpu#0, frozen, scale 1.0, zero point 1; rank 0 has "
    return told in str(caught.value), module.base.dequantize().tolist()


# The attribute, its new value, and the name in the text.
_CHANGES: dict[str, tuple[str, Callable[[], torch.Tensor], str]] = {
    "an element": ("base", lambda: nn.Parameter(_quantized([1.0, 2.5], 0.5, 1), False), "parameter 'base'"),
    # With the integers of before. Of a parameter the layout would tell.
    "the scale": ("table", lambda: _quantized([8.0, 20.0], 1.0), "buffer 'table'"),
    "an element of a channel": ("channels", lambda: _by_channel(1.5, [0.5, 1.0]), "buffer 'channels'"),
}


def _change(rank: int, change: str, checks: Any, ranks: tuple[int, ...]) -> list[str]:
    """What calls said, and a comparison after them."""
    model = LegacyDistributedDataParallel(_Adapted(1.0), checks=checks)
    optimizer = torch.optim.SGD(model.module.adapter.parameters(), lr=0.125)
    said = []
    for step in range(4 if checks == "detail" else 2 * _ROTATION):
        optimizer.zero_grad()
        model(torch.tensor([1.0, rank])).sum().backward()
        try:
            model.all_reduce()
        except ReplicaDivergenceError as error:
            return [f"call {error.call}", str(error)]
        if text := "\n".join(logged_warnings.take()):
            said += [f"call {step + 1}", text]
        optimizer.step()
        if step == 1 and rank in ranks:
            name, make, _ = _CHANGES[change]
            setattr(model.module, name, make())
    return [*said, "" if (report := check_replicas(model, what=["parameters", "buffers"])).identical else str(report)]


def test_a_quantized_tensor_that_one_rank_alone_changes_is_told() -> None:
    cases = {f"{name}, {level}": (name, level, (1,)) for name in _CHANGES for level in ("info", "detail")}
    found = run_cases(_change, 2, cases)

    for name, (_, _, tensor) in _CHANGES.items():
        for level in ("info", "detail"):
            first, second = found[f"{name}, {level}"]
            assert first == second
            call, *texts = first
            assert int(call.removeprefix("call ")) <= (3 if level == "detail" else 3 + _ROTATION), (name, level)
            assert all(tensor in text for text in texts), (name, level)
            assert len(texts) == (1 if level == "detail" else 2)


def test_quantized_tensors_that_no_rank_or_every_rank_changes_are_silent() -> None:
    cases: dict[str, Any] = {"off": ("an element", "off", (0, 1))}
    for level in ("info", "detail"):
        cases[f"nothing, {level}"] = ("", level, ())
        cases |= {f"{name}, {level}": (name, level, (0, 1)) for name in _CHANGES}

    assert run_cases(_change, 2, cases) == {name: [[""]] * 2 for name in cases}


def test_a_digest_has_the_integers_the_scale_and_the_channels() -> None:
    tensors = [
        _quantized([1.0, 2.0]),
        _quantized([1.0, 2.5]),
        _quantized([2.0, 4.0], 1.0),
        _quantized([1.0, 2.0], 0.5, 1),
        _by_channel(1.0, [0.5, 1.0]),
        _by_channel(1.5, [0.5, 1.0]),
        _by_channel(1.0, [0.5, 2.0]),
    ]

    assert len({*map(digest_of, tensors)}) == len(tensors)
    assert digest_of(_quantized([1.0, 2.0])) == digest_of(tensors[0])
    assert digest_of(_quantized([1.0, 0.0, 2.0, 0.0])[::2]) == digest_of(tensors[0])


def _inference_net() -> nn.Module:
    with torch.inference_mode():
        return nn.Linear(2, 1)


def _with(odd: torch.Tensor) -> nn.Module:
    """A layer with a further parameter or buffer."""
    module = nn.Linear(2, 1)
    (module.register_parameter if isinstance(odd, nn.Parameter) else module.register_buffer)("odd", odd)
    return module


def _parameter_around_tensors() -> nn.Module:
    return _with(nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)), requires_grad=False))


_REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "inference": (
        _inference_net,
        "parameter 'bias' was made in torch.inference_mode(), expected a tensor that autograd can train; make the "
        "module outside of inference_mode(), or wrap copy.deepcopy(module)",
    ),
    "complex32": (
        lambda: _with(nn.Parameter(torch.zeros(2, dtype=torch.complex32))),
        "parameter 'odd' has gradients of dtype torch.complex32, expected one of bfloat16, complex128, complex64, "
        "float16, float32, float64; freeze it or list it in ignore=",
    ),
    "packed": (
        lambda: _with(_packed()),
        f"buffer 'odd' is of dtype torch.quint4x2, with several elements in a byte, expected a dense tensor{_ADVICE}",
    ),
    "a buffer around tensors": (
        lambda: _with(TwoTensor(torch.ones(2), torch.ones(2))),
        f"buffer 'odd' is a TwoTensor without memory of its own, expected a plain tensor{_ADVICE}",
    ),
    "a parameter around tensors": (
        _parameter_around_tensors,
        f"parameter 'odd' is a TwoTensor without memory of its own, expected a plain tensor{_ADVICE}",
    ),
}


def _refuse(_: int, name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of complex32
        module = _REFUSED[name][0]()
    said = error_of(LegacyDistributedDataParallel, module)
    if "ignore=" in said[1]:  # the group is still usable
        LegacyDistributedDataParallel(module, ignore=["odd"])
    return said


def test_a_tensor_that_cannot_be_exchanged_is_refused_by_name() -> None:
    found = run_cases(_refuse, 2, {name: (name,) for name in _REFUSED})

    assert found == {name: [("ValueError", text)] * 2 for name, (_, text) in _REFUSED.items()}


@on_ranks(2, [True] * 2)
def test_a_deep_copy_of_a_module_made_in_inference_mode_is_trained(rank: int) -> bool:
    model = LegacyDistributedDataParallel(copy.deepcopy(_inference_net()))
    model(torch.ones(1, 2) * rank).sum().backward()
    model.all_reduce()
    return model.module.weight.grad is not None


def test_a_tensor_around_others_is_left_out_of_checks_and_listed() -> None:
    note = "not compared, because their bits cannot be read: parameter 'odd'"
    said = (
        "all_reduce() call 1: tensors whose bits cannot be read are not compared between ranks (told once):\n"
        "parameter 'odd'; list them in ignore="
    )

    found = run_cases(_train_around, 2, {"info": ("info",), "detail": ("detail",)})
    assert found == {checks: [[said, note], ["", note]] for checks in found}  # rank 1 says nothing


def _train_around(rank: int, checks: Any) -> list[str]:
    """What the calls said, and the notes of a comparison."""
    torch.manual_seed(0)
    model = LegacyDistributedDataParallel(_parameter_around_tensors(), checks=checks, init_sync=False)
    optimizer = torch.optim.SGD([model.module.weight, model.module.bias], lr=0.125)
    for _ in range(3):
        model(torch.ones(1, 2) * rank).sum().backward()
        model.all_reduce()
        optimizer.step()
        optimizer.zero_grad()
    return ["\n".join(logged_warnings.take()), *check_replicas(model, what=["parameters"]).notes]
