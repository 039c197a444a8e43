"""One call with given gradients on given ranks, and what a single process says it should leave."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from legacy_ddp import Checks, LegacyDistributedDataParallel
from tests.helpers.ranks import run_ranks

Grads = list[torch.Tensor | None]
Part = dict[str, Any]  # the arguments of all_reduce() on one rank

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
SKIP: Part = {"skip": True}


def module_of(parameters: Sequence[torch.Tensor]) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(tensor, requires_grad=tensor.dtype in DTYPES) for tensor in parameters])


def wrap_module(parameters: Sequence[torch.Tensor], **options: Any) -> LegacyDistributedDataParallel:
    return LegacyDistributedDataParallel(
        module_of(parameters), **{"checks": Checks(uneven="allow", nonfinite="ignore"), **options}
    )


def set_gradients(wrapped: LegacyDistributedDataParallel, grads: Grads) -> None:
    for parameter, grad in zip(wrapped.module.parameters(), grads, strict=True):
        parameter.grad = grad


def get_gradients(module: nn.Module) -> Grads:
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def bits_of(tensor: torch.Tensor | None) -> object:
    if tensor is None:
        return None
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return "sparse", tensor.shape, bits_of(tensor.indices()), bits_of(tensor.values())
    return tensor.dtype, tensor.shape, bytes(tensor.resolve_conj().reshape(-1).view(torch.uint8).tolist()).hex()


def all_bits(grads: Grads) -> list[object]:
    return [bits_of(grad) for grad in grads]


@dataclass(frozen=True)
class Case:
    """One module and what every rank brings to one call on it."""

    parameters: Sequence[torch.Tensor]
    grads: Sequence[Grads]
    parts: Sequence[Part] = ({}, {}, {}, {})
    options: Mapping[str, Any] = field(default_factory=dict)


def call_once(cases: Sequence[Case], rank: int) -> list[Grads]:
    results = []
    for case in map(copy.deepcopy, cases):  # a call may write into the gradients it was given
        wrapped = wrap_module(case.parameters, **case.options)
        set_gradients(wrapped, case.grads[rank])
        wrapped.all_reduce(**case.parts[rank])
        results.append(get_gradients(wrapped))
    return results


def reduced_on_all(cases: Mapping[Any, Case]) -> dict[Any, Grads]:
    """The gradients after one call for each case, once it is sure that all ranks hold the same bits."""
    (world_size,) = {len(case.grads) for case in cases.values()}
    results = run_ranks(partial(call_once, list(cases.values())), world_size)
    for label, *of_ranks in zip(cases, *results, strict=True):
        for grads in of_ranks[1:]:
            assert all_bits(grads) == all_bits(of_ranks[0]), label
    return dict(zip(cases, results[0], strict=True))


def both_ways(cases: Mapping[Any, Case]) -> dict[Any, Case]:
    """Each case with gradients as views and without."""
    return {
        (label, as_view): replace(case, options={**case.options, "gradient_as_bucket_view": as_view})
        for label, case in cases.items()
        for as_view in (True, False)
    }


def check_case(cases: Mapping[Any, Case], expected: Mapping[Any, Grads]) -> None:
    """Each case gives, bit for bit, what is expected of it, with views and without."""
    for (label, as_view), grads in reduced_on_all(both_ways(cases)).items():
        assert all_bits(grads) == all_bits(expected[label]), (label, as_view, grads)


def vectors(*values: Sequence[float]) -> list[Grads]:
    """One parameter: a gradient per rank."""
    return [[torch.tensor(value)] for value in values]


def sparse_of(rows: Sequence[int], values: torch.Tensor, size: int = 5) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([rows]), values, (size, *values.shape[1:]), check_invariants=True)
