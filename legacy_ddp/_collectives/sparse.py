"""Sum of sparse gradients over the ranks, in rank order. Collective (payload)."""

from collections.abc import Sequence
from typing import Any

import torch

from legacy_ddp._buckets.gradient import SPARSE
from legacy_ddp._buckets.inventory import gradient_dtype
from legacy_ddp._buckets.plan import Plan
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._transport.call import Call


def reduce_sparse(
    call: Call, plan: Plan, packed: Packed, kinds: Sequence[int], divisor: int
) -> tuple[dict[int, torch.Tensor], int]:
    """The reduced sparse gradients by slot, and the bytes sent."""
    indices = [index for index, kind in enumerate(kinds) if kind >= SPARSE]
    own = [packed.sparse.get(index, _no_entries(plan.parameters[index], kinds[index] - SPARSE)) for index in indices]
    lengths = call.gather(torch.tensor([grad._nnz() for grad in own], device="cpu")).T.tolist()
    results = [_reduce(call, grad, counts, divisor) for grad, counts in zip(own, lengths, strict=True)]
    return {index: grad for index, (grad, _) in zip(indices, results, strict=True)}, sum(size for _, size in results)


def _reduce(call: Call, grad: torch.Tensor, lengths: Sequence[int], divisor: int) -> tuple[torch.Tensor, int]:
    """Sum of every rank's coalesced ``grad``, divided; and the bytes sent.

    ``lengths[r]``: number of entries on rank r.
    """
    group, longest = call.groups.payload(grad.device), max(lengths)
    indices = grad.indices().new_zeros((grad.sparse_dim(), longest))
    indices[:, : lengths[call.groups.rank]] = grad.indices()
    values = grad.values().new_zeros((longest, *grad.values().shape[1:]))
    values[: lengths[call.groups.rank]] = grad.values()
    all_indices = _gather(call, group, indices)
    all_values = _gather(call, group, values)
    total = torch.sparse_coo_tensor(
        torch.cat([part[:, :length] for part, length in zip(all_indices, lengths, strict=True)], dim=1),
        torch.cat([part[:length] for part, length in zip(all_values, lengths, strict=True)]).to(_sum_dtype(grad.dtype)),
        (*grad.shape, 2) if grad.is_complex() else grad.shape,
        check_invariants=False,
    ).coalesce()
    mean = total.values() / divisor if divisor != 1 else total.values()
    reduced = torch.sparse_coo_tensor(
        total.indices(),
        torch.view_as_complex(mean) if grad.is_complex() else mean.to(grad.dtype),
        grad.shape,
        is_coalesced=True,
        check_invariants=False,
    )
    return reduced, indices.nbytes + values.nbytes


def _no_entries(parameter: torch.Tensor, sparse_dim: int) -> torch.Tensor:
    dtype = gradient_dtype(parameter)
    values = torch.empty((0, *parameter.shape[sparse_dim:]), dtype=dtype, device=parameter.device)
    indices = torch.empty((sparse_dim, 0), dtype=torch.int64, device=parameter.device)
    return torch.sparse_coo_tensor(indices, values, parameter.shape, is_coalesced=True, check_invariants=False)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float16 else dtype.to_real()


def _gather(call: Call, group: Any, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Collective: the tensors of all ranks, of equal shape; complex numbers as pairs, which are added and divided
    apart."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if call.groups.size == 1:
        return [real]
    parts = [torch.empty_like(real) for _ in range(call.groups.size)]
    options = call.options("Allgather")
    call.run(group, lambda carrier: carrier.allgather([parts], [real.contiguous()], options))
    return parts
