"""Tests of ranks on a device that is not the CPU: the simulated one, or a real one by its name.

In the ranks of such a test the device is torch's default, and their process group has a backend for it. So a test
needs no change as long as its tensors are made without a device.
"""

import io
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import backend_registration

VARIABLE = "TEST_DEVICE"
SIMULATED = "sim"
# Not empty: ``make test DEVICE=cuda`` runs the tests for devices alone, and on this kind.
CHOSEN = os.environ.get(VARIABLE, "")

# The simulated device needs interfaces of newer torches.
needs_a_device = pytest.mark.skipif(
    not CHOSEN and not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices in Python",
)


def missing(kind: str) -> str | None:
    """Why no tests can run on devices of this kind; None if they can."""
    if kind == SIMULATED:
        return None
    try:
        module = torch.get_device_module(kind)
    except RuntimeError as error:
        return f"torch {torch.__version__} knows no device {kind!r}: {str(error).splitlines()[0]}"
    if not module.is_available():
        return f"torch {torch.__version__} sees no device of the kind {kind!r} on this machine"
    backend = _backend_of(kind)
    if backend is None or not dist.is_backend_available(backend):
        return f"torch {torch.__version__} has no backend of torch.distributed for {kind!r}, and the tests need one"
    return None


def enter(kind: str | None, rank: int) -> str:
    """Make ``kind`` the default device of this process, a rank. Returns the backends for its process group."""
    if kind is None:
        return "gloo"
    if kind == SIMULATED:
        from tests.helpers.simulated_group import register

        register()
    else:
        # NCCL refuses two ranks of one host on one device. With these names every rank is on a host of its own.
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_SOCKET_IFNAME="lo")
        module = torch.get_device_module(kind)
        module.set_device(rank % module.device_count())
    torch.set_default_device(kind)
    return f"cpu:gloo,{kind}:{_backend_of(kind)}"


def _backend_of(kind: str) -> str | None:
    return dist.Backend.default_device_backend_map.get(kind)


def to_bytes(result: object) -> bytes:
    """``result``, pickled; tensors of a device become tensors on the CPU."""
    data = io.BytesIO()
    _Pickler(data).dump(result)
    return data.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def count_waits(run: Callable[[], object]) -> int | None:
    """How often the host waits for the default device in the library during ``run``; None where nothing counts that."""
    kind = torch.get_default_device().type
    if kind == SIMULATED:
        from tests.helpers.simulated_device import device

        before = device.waits_of_the_library()
        run()
        return device.waits_of_the_library() - before
    if kind != "cuda":
        run()
        return None
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        run()
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)
