"""Differences between the supported versions of torch."""

import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.devices import CAN_SIMULATE

HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")

needs_grad_dtype = pytest.mark.skipif(not HAS_GRAD_DTYPE, reason="Tensor.grad_dtype is new in torch 2.10")

needs_simulation = pytest.mark.skipif(not CAN_SIMULATE, reason="this torch has no devices in Python")

# torch.jit is deprecated: in other words and classes of warnings in each version of torch and of Python.
uses_torch_jit = pytest.mark.filterwarnings("ignore:.*torch.jit")

# Control flow compiles its branches, also outside of compiled code.
leaves_compiler_alone = pytest.mark.skipif(
    not hasattr(TorchDispatchMode, "ignore_compile_internals"),
    reason="in older versions of torch no dispatch mode leaves the compiler alone",
)


def without_gloo_lines(stdout: str) -> str:
    """``stdout`` without the line that gloo prints for each group in torch 2.8 and 2.9."""
    return re.sub(r"(?m)^\[Gloo\] Rank .*\n", "", stdout)
