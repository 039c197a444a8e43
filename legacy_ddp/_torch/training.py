"""The parts of a training script: gradient scalers, and buffers of modules."""

import gc
import sys
from collections.abc import Iterable, Iterator
from typing import cast

import torch
from torch.amp.grad_scaler import OptState
from torch.nn.modules.batchnorm import _NormBase


def all_scalers() -> list[torch.amp.GradScaler]:
    """Every GradScaler in this process. Looks at all objects, which may take seconds: not for every step."""
    return [found for found in gc.get_objects() if issubclass(type(found), torch.amp.GradScaler)]


def largest_used_scaler(scalers: Iterable[torch.amp.GradScaler]) -> torch.amp.GradScaler | None:
    """Of the scalers that have scaled a loss the one with the largest scale."""
    used = [scaler for scaler in scalers if scaler.is_enabled() and scaler._scale is not None]
    return max(used, key=torch.amp.GradScaler.get_scale, default=None)


_SCALER_STEP = torch.amp.GradScaler.step.__code__


def calling_scaler() -> torch.amp.GradScaler | None:
    """The GradScaler whose ``step()`` is running in the calling thread."""
    frame = sys._getframe(1)
    while frame.f_code is not _SCALER_STEP:
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return cast(torch.amp.GradScaler, frame.f_locals["self"])


def has_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``scaler.unscale_(optimizer)`` ran, and neither ``scaler.step()`` nor ``scaler.update()`` since."""
    states = scaler._per_optimizer_states if scaler.is_enabled() else {}
    return states.get(id(optimizer), {}).get("stage") is OptState.UNSCALED


def unsaved_buffer_names(module: torch.nn.Module) -> set[str]:
    """Names of the buffers that are not saved."""
    found: set[str] = set()
    for prefix, child in module.named_modules(remove_duplicate=False):
        found.update(_full_names(prefix, child._non_persistent_buffers_set))
    return found


def updated_statistics_names(module: torch.nn.Module) -> set[str]:
    """Names of the buffers that a forward pass would change: of normalisation layers in training that track statistics.

    With ``momentum=0`` a layer only counts its batches.
    """
    found: set[str] = set()
    for prefix, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, _NormBase) and child.training and child.track_running_stats:
            found.update(_full_names(prefix, ["num_batches_tracked"] if child.momentum == 0 else child._buffers))
    return found


def statistics_names(module: torch.nn.Module) -> set[str]:
    """Names of the buffers of normalisation layers."""
    found: set[str] = set()
    for prefix, child in module.named_modules(remove_duplicate=False):
        if isinstance(child, _NormBase):
            found.update(_full_names(prefix, child._buffers))
    return found


def running_statistics(module: torch.nn.Module) -> Iterator[tuple[str, str, dict[str, torch.Tensor]]]:
    """Layers that update running statistics on the data of their rank: name, class, and buffers by full name.

    Without layers of torch.nn.SyncBatchNorm, which have the statistics of all ranks, and layers with momentum 0.
    """
    for prefix, child in module.named_modules():
        if not isinstance(child, _NormBase) or isinstance(child, torch.nn.SyncBatchNorm) or child.momentum == 0:
            continue
        buffers = {name: buffer for name, buffer in child._buffers.items() if buffer is not None}
        if buffers:
            yield prefix, type(child).__name__, dict(zip(_full_names(prefix, buffers), buffers.values(), strict=True))


def version_of(tensor: torch.Tensor) -> int:
    """The number of writes to a tensor; 0 for a tensor made in inference mode, which counts none."""
    return 0 if tensor.is_inference() else tensor._version


def _full_names(prefix: str, names: Iterable[str]) -> list[str]:
    return [f"{prefix}.{name}" if prefix else name for name in names]
