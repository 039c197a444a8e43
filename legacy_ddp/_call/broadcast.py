"""Comparison of the ranks in the constructor, and broadcasts of parameters and buffers. Collective."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp import _torch as internals
from legacy_ddp._call.state import Synchronizer
from legacy_ddp._call.transport_choice import Transport
from legacy_ddp._log import check_variables
from legacy_ddp._memory.layout import Named, build_inventory, check_dense, distinct, inventory_digest
from legacy_ddp._memory.plan import Plan, parameter_columns
from legacy_ddp._ranks.agree import agree, announcing_failures
from legacy_ddp._ranks.call import Call, check_can_communicate
from legacy_ddp._ranks.header import Header, Operation
from legacy_ddp._replicas.state import check_local_buffers
from legacy_ddp._settings import Settings, check_ignored
from legacy_ddp._torch import device as devices

CHUNK_BYTES = 32 * 2**20  # sent by one collective: larger chunks would need more memory for their copies


def construct(
    call: Call,
    transport: Transport,
    module: nn.Module,
    settings: Settings,
    plan: Callable[[], Plan],
    *,
    world_size: int | None,
    wrapper: type[nn.Module],
    problem: Exception | None,
) -> None:
    """Check the arguments, plan, and compare the plan over the ranks.

    ``problem``: an earlier error of this rank, raised here so that the other ranks learn of it. ``wrapper``: a class
    forbidden inside ``module``.
    """
    with announcing_failures(call):
        if problem is not None:
            raise problem
        check_variables()
        if isinstance(world_size, bool) or not isinstance(world_size, int | None):
            raise TypeError(
                f"world_size is of the wrong type: got {type(world_size).__name__}, expected an int or None; "
                "a process group goes to process_group=, and torch DDP's device_ids are left out"
            )
        if world_size is not None and world_size != call.groups.size:
            raise ValueError(
                f"world_size does not match the process group: got {world_size}, expected {call.groups.size}; "
                "leave it out, or pass the group of that size"
            )
        wrappers = (wrapper, DistributedDataParallel)
        if inside := [type(child).__name__ for child in module.modules() if isinstance(child, wrappers)]:
            raise ValueError(f"module contains a {inside[0]}, expected no wrapper; wrap the plain module, once")
        check_ignored(module, settings.ignore)
        check_local_buffers(module, settings.checks.local_buffers)
        layout = plan().layout
    agree(call, Header(layout=layout.fingerprint), layout.inventory)
    transport.require_host(call)
    transport.before_pack()


def broadcast_parameters(synchronizer: Synchronizer, module: nn.Module, group: dist.ProcessGroup, *, src: int) -> None:
    """Collective: give every rank the parameters of rank ``src``, frozen ones too, except ignored parameters."""
    parameters = parameter_columns(module)
    named = zip(*parameters, strict=True)
    _broadcast(synchronizer, Operation.BROADCAST_PARAMETERS, group, named, kind="parameter", src=src)
    synchronizer.note_new_parameters(synchronizer.planner.plan(parameters))
    synchronizer.warnings.emit()


def broadcast_buffers(synchronizer: Synchronizer, module: nn.Module, group: dist.ProcessGroup, *, src: int) -> None:
    """Collective: give every rank the buffers of rank ``src``, except ignored buffers."""
    named = module.named_buffers(remove_duplicate=False)
    _broadcast(synchronizer, Operation.BROADCAST_BUFFERS, group, named, kind="buffer", src=src)
    synchronizer.note_new_buffers()


@internals.disable_dynamo
@internals.keeps_grad_mode
def _broadcast(
    synchronizer: Synchronizer,
    operation: Operation,
    group: dist.ProcessGroup,
    named: Iterable[tuple[str, torch.Tensor]],
    *,
    kind: str,
    src: int,
) -> None:
    """Collective: give every rank the bits of the tensors of rank ``src``, of any dtype and strides.

    Raises, before anything is written:
        ValueError: ``src`` is not a rank of the group, or a tensor is not dense or has no memory of its own (PeerError
            if only on some ranks).
        LayoutError: ranks hold different tensors. DesyncError: ranks are in different calls or pass different ``src``.
    """
    with torch.no_grad(), synchronizer.call(operation, group) as call:
        with announcing_failures(call):
            check_can_communicate(call)
            if isinstance(src, bool) or not isinstance(src, int) or not 0 <= src < call.groups.size:
                raise ValueError(f"src is no rank of the group: got {src!r}, expected 0 to {call.groups.size - 1}")
            tensors = distinct(named, synchronizer.settings.ignore)
            for item in tensors:
                check_dense(item, kind=kind)
                _check_memory(item, kind=kind)
                call.groups.payload(item.tensor.device)
            inventory = {**synchronizer.planner.module, **build_inventory(tensors, kind=kind)}
        on_device = any(item.tensor.device.type != "cpu" for item in tensors)
        header = Header(layout=inventory_digest(inventory), source=src)
        if operation == Operation.BROADCAST_PARAMETERS:  # also at the end of a join; buffers may travel in every step
            header.flags = synchronizer.checks.late.flush_flag(call.groups)
        synchronizer.flush(call, agree(call, header, inventory, on_device=on_device))
        if call.groups.size == 1:
            return
        with call.payload(devices.devices_of(item.tensor for item in tensors)):
            for chunk in _chunks([_writable(item.tensor) for item in tensors]):
                _broadcast_chunk(call, chunk, src)


def _check_memory(item: Named, *, kind: str) -> None:
    if internals.wraps_others(item.tensor):  # its address, which gloo would read, is not that of its elements
        raise ValueError(
            f"{kind} {item.name!r} is a {type(item.tensor).__name__} without memory of its own, expected a plain "
            "tensor; list it in ignore="
        )


def _broadcast_chunk(call: Call, chunk: Sequence[torch.Tensor], src: int) -> None:
    # In logical order, because strides may differ between ranks.
    flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
    call.broadcast(flat, src)
    # Rank src writes its own values back: a write on the other ranks only would look like a weight update there.
    for tensor, piece in zip(chunk, torch.split(flat, [tensor.numel() for tensor in chunk]), strict=True):
        tensor.copy_(piece.view(tensor.shape))


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of equal device and dtype, about CHUNK_BYTES at a time, in the same order on all ranks."""
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    for group in alike.values():
        chunk: list[torch.Tensor] = []
        size_bytes = 0
        for tensor in group:
            if chunk and size_bytes + tensor.nbytes > CHUNK_BYTES:
                yield chunk
                chunk, size_bytes = [], 0
            chunk.append(tensor)
            size_bytes += tensor.nbytes
        yield chunk


def _writable(tensor: torch.Tensor) -> torch.Tensor:
    """A view that has each memory location once. A quantized tensor as its integers."""
    tensor = internals.integers_of(tensor.detach()) if tensor.is_quantized else tensor.detach()
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:  # expanded: all indices are the same memory
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
