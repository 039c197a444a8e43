"""Kinds of gradient, and the refusal of unusable gradients."""

from collections.abc import Sequence

import torch

from legacy_ddp._buckets.layout import Bucket, Slot
from legacy_ddp._errors import GradientError

ABSENT, DENSE, SPARSE = 0, 1, 2  # kinds of gradient; SPARSE + sparse_dim for a sparse gradient


def kinds_of(grads: Sequence[torch.Tensor | None]) -> list[int]:
    """The kind of each gradient: ABSENT, DENSE, or SPARSE + sparse_dim."""
    return [
        ABSENT if grad is None else DENSE if grad.layout is torch.strided else SPARSE + grad.sparse_dim()
        for grad in grads
    ]


def has_nonzero(grad: torch.Tensor) -> bool:
    """Whether any element is not zero."""
    values = grad.coalesce().values() if grad.is_sparse else grad
    # The norm is 20 times as fast as any(), but may underflow.
    return bool(torch.linalg.vector_norm(values)) or bool(values.any())


def is_plain(bucket: Bucket, slot: Slot, grad: torch.Tensor) -> bool:
    """Whether ``grad`` is a plain dense gradient exactly as planned."""
    return (
        grad.layout is torch.strided
        and grad.device == bucket.device
        and grad.dtype == bucket.dtype
        and grad.shape == slot.shape
        and grad.stride() == slot.stride
        and not (grad.requires_grad or grad.is_inference())
    )


def check_gradient(bucket: Bucket, slot: Slot, grad: torch.Tensor) -> None:
    """Refuse a gradient unusable for reduction.

    Raises:
        GradientError: ``grad`` requires grad, has a shape or dtype other than planned, or an unsupported layout.
    """
    if grad.requires_grad:
        problem = "requires grad: got create_graph=True, expected a plain gradient; detach it before all_reduce()"
    elif grad.layout not in (torch.strided, torch.sparse_coo):
        problem = f"has layout {grad.layout}, expected strided or sparse_coo; convert it before all_reduce()"
    elif grad.shape != slot.shape:
        problem = (
            f"has shape {tuple(grad.shape)}, expected {tuple(slot.shape)}; assign a gradient of the parameter's shape"
        )
    elif grad.dtype != bucket.dtype:
        problem = f"has dtype {grad.dtype}, expected {bucket.dtype}; cast it, or set grad_dtype on the parameter"
    else:
        return
    raise GradientError(f"grad of {slot.name!r} {problem}", parameter=slot.name)
