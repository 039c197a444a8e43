"""The form in which a bucket is sent or added: its dtype, and complex numbers as pairs of real numbers."""

import torch


def as_real(flat: torch.Tensor) -> torch.Tensor:
    """The same memory, each complex number as two real numbers."""
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def wire_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a bucket of ``dtype`` is sent: complex buckets unchanged, other buckets in ``reduce_dtype``.

    Without ``reduce_dtype`` fp16 is sent as fp32: no divisor applied before the sum serves both ends of the range of
    fp16 (at two ranks 40000 + 40000 overflows undivided, and 6e-8 divided by 2 is 0).
    """
    if dtype.is_complex:
        return dtype
    if reduce_dtype is not None:
        return reduce_dtype
    return torch.float32 if dtype == torch.float16 else dtype


def sum_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """The real dtype in which shared memory adds a bucket of ``dtype``: at least fp32, and at least ``reduce_dtype``.

    Nothing is sent, so that a narrower ``reduce_dtype`` saves nothing. Complex numbers are added as pairs of their own
    precision.
    """
    if dtype.is_complex:
        return dtype.to_real()
    return torch.promote_types(torch.promote_types(dtype, torch.float32), reduce_dtype or dtype)
