"""all_reduce_gradients(): same results as the method, and nothing kept alive."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from legacy_ddp import LegacyDistributedDataParallel, all_reduce_gradients
from tests.helpers.cases import Part, all_bits, get_gradients
from tests.helpers.shared_jobs import on_ranks, run_cases
from tests.helpers.small_models import error_of


def _function(rank: int, form: str) -> tuple[list[object], list[object]]:
    module, twin = (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)) for _ in range(2))
    wrapped = LegacyDistributedDataParallel(twin)
    module.load_state_dict(twin.state_dict())
    forms: dict[str, Callable[[], Any]] = {
        "module": lambda: module,
        "list": lambda: list(module.parameters()),
        "generator": module.parameters,
    }
    ours, theirs = [], []
    for step in range(4):
        for model in (module, twin):
            model.zero_grad(set_to_none=step % 2 == 0)
            F.mse_loss(model(torch.full((1, 3), float(rank + step))), torch.ones(1, 1)).backward()
        part: Part = [{}, {"sample_size": rank + 1}, {"skip": rank == 1}, {"sample_size": 0}][step]
        record = all_reduce_gradients(forms[form](), **part)
        assert record.call == step + 1
        assert record.divisor == wrapped.all_reduce(**part).divisor
        ours.append(all_bits(get_gradients(module)))
        theirs.append(all_bits(get_gradients(twin)))
    return ours, theirs


@pytest.mark.unsimulated("its operations resize their results")
def test_function_equals_the_method_call_after_call() -> None:
    for first, second in run_cases(_function, 2, {form: (form,) for form in ("module", "list", "generator")}).values():
        assert first == second
        assert first[0] == first[1]
        assert first[0][-1] == [None] * 4


def _leftovers(rank: int, form: str) -> list[bool]:
    module = nn.Linear(2, 1)
    module(torch.ones(1, 2)).sum().backward()
    wrapped: nn.Module = module
    if form == "wrapper":
        wrapped = LegacyDistributedDataParallel(module)
        wrapped.all_reduce()
    else:
        all_reduce_gradients(module if form == "module" else module.parameters())
    alive = [weakref.ref(thing) for thing in (wrapped, module, module.weight, module.weight.grad)]
    del module, wrapped
    gc.collect()
    return [ref() is not None for ref in alive]


def test_nothing_of_a_module_outlives_it() -> None:
    cases = {form: (form,) for form in ("module", "parameters", "wrapper")}
    assert run_cases(_leftovers, 1, cases) == {form: [[False] * 4] for form in cases}


@on_ranks(2, [[0, 0]] * 2)
def test_function_with_nothing_to_reduce_does_nothing(rank: int) -> list[int]:
    return [all_reduce_gradients([]).payload_bytes, all_reduce_gradients(nn.ReLU()).payload_bytes]


@on_ranks(2, [(1, 0.5)] * 2)
def test_function_refuses_what_is_no_parameter_and_the_group_stays_usable(rank: int) -> tuple[int, float]:
    module = nn.Linear(2, 2, bias=False)
    module(torch.full((1, 2), float(rank))).sum().backward()
    refused: list[tuple[Any, str]] = [
        ([1.0], "TypeError: module_or_params is unusable: got list with float, expected a module or its parameters"),
        ([module], "TypeError: module_or_params is unusable: got list with Linear, expected"),
        (torch.optim.SGD(module.parameters()), "TypeError: module_or_params is unusable: got SGD, expected"),
        (
            [module.weight.grad],
            "ValueError: module_or_params has nothing to train: got 1 tensors without requires_grad",
        ),
        (module.weight.data, "ValueError: module_or_params has nothing to train: got 1 tensors without"),
    ]
    for given, text in refused:
        kind, said = error_of(all_reduce_gradients, given)  # type: ignore[misc]
        assert f"{kind}: {said}".startswith(text)
    record = all_reduce_gradients(module.weight)  # type: ignore[arg-type]  # one parameter is no list of its rows
    return record.call, float(module.weight.grad[0, 0])
