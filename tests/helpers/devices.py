"""Tests of ranks on a device that is not the CPU: the simulated one, or a real one by its name.

In the ranks of such a test the device is torch's default, and their process group has a backend for it. So a test
needs no change as long as its tensors are made without a device.
"""

import io
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration

import legacy_ddp

_PACKAGE = str(Path(legacy_ddp.__file__).parent)
CPU, SIMULATED = "cpu", "sim"
# Not empty: ``make test DEVICE=cuda`` runs the tests for devices alone, and on this kind.
CHOSEN = os.environ.get("TEST_DEVICE", "")
CAN_SIMULATE = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")


def is_real() -> bool:
    """Whether the tests for devices run on a device that is not simulated."""
    return CHOSEN not in ("", SIMULATED)


def missing(kind: str) -> str | None:
    """Why no tests can run on devices of this kind; None if they can."""
    if kind == SIMULATED:
        return None if CAN_SIMULATE else f"torch {torch.__version__} has no devices in Python"
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


def enter(kind: str) -> str:
    """Make ``kind`` the default device of this process, once. Returns the backends for its process groups."""
    if kind == CPU:
        return "gloo"
    if kind == SIMULATED:
        from tests.helpers.simulated_group import register

        register()
    else:
        # NCCL refuses two ranks of one host on one device. With these names every rank is on a host of its own.
        os.environ.update(NCCL_HOSTID=f"process-{os.getpid()}", NCCL_SOCKET_IFNAME="lo")
    torch.set_default_device(kind)
    _Generators(kind).__enter__()
    return f"cpu:gloo,{kind}:{_backend_of(kind)}"


def choose(rank: int) -> None:
    """Take the device of this rank, with a generator as in a new process."""
    kind = torch.get_default_device().type
    if kind == CPU:
        return
    module = torch.get_device_module(kind)
    if kind != SIMULATED:
        module.set_device(rank % module.device_count())
        # Of the first backward in a process.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
    module.manual_seed(0)


def assert_no_races() -> None:
    """On the simulated device: no operation has touched memory of a collective before its wait."""
    if torch.get_default_device().type == SIMULATED:
        from tests.helpers.simulated_device import device

        races, device.races = device.races, []
        assert races == []


class _Generators(TorchFunctionMode):
    """Random numbers of a generator of the CPU are drawn there, and travel to devices of ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        generator = kwargs.get("generator")
        if generator is None or generator.device.type != CPU:
            return function(*args, **kwargs)
        if function in (torch.rand, torch.randn, torch.randint, torch.randperm):
            return function(*args, **{"device": CPU} | kwargs).to(kwargs.get("device", self._kind))
        if "tensor" in kwargs:  # torch.nn.init gives it by name
            args = (kwargs.pop("tensor"), *args)
        if args and isinstance(args[0], torch.Tensor) and args[0].device.type != CPU:
            drawn = torch.empty_like(args[0], device=CPU)
            function(drawn, *args[1:], **kwargs)
            with torch.no_grad():
                return args[0].copy_(drawn)
        return function(*args, **kwargs)


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


def from_bytes(data: bytes) -> Any:
    """What ``pickle.dumps()`` has made ``data`` of; tensors on the CPU become tensors on the default device."""
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        is_device = torch.get_default_device().type != CPU
        return _load_on_device if found is torch.storage._load_from_bytes and is_device else found


def _load_on_device(data: bytes) -> Any:
    """A storage: so tensors keep their strides."""
    storage = torch.storage._load_from_bytes(data)
    moved = torch.empty(0, dtype=torch.uint8, device=CPU).set_(storage._untyped_storage).to(torch.get_default_device())
    return torch.storage.TypedStorage(wrap_storage=moved.untyped_storage(), dtype=storage.dtype, _internal=True)


def count_waits(run: Callable[[], object]) -> int | None:
    """How often the host waits for the default device in the library during ``run``; None where nothing counts that.

    Waits of the script and of torch alone do not count: Adam of torch reads its steps from the default device.
    """
    kind = torch.get_default_device().type
    if kind == SIMULATED:
        from tests.helpers.simulated_device import device

        before = device.waits_of_the_library()
        run()
        return device.waits_of_the_library() - before
    if kind != "cuda":
        run()
        return None
    waits: list[str] = []

    def note(message: Warning | str, *_: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message) and (place := place_in_library()):
            waits.append(place)

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note  # called where torch warns
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return len(waits)


def place_in_library() -> str:
    """The line of the library that called; empty for a line of a test."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGE):
            return f"{frame.f_code.co_filename[len(_PACKAGE) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
