"""One rank's tensors -> everybody's. Collective."""

from collections.abc import Iterator, Sequence

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._agreement.agree import agree, announcing_failures
from legacy_ddp._agreement.header import Header
from legacy_ddp._buckets.inventory import Named, build_inventory, check_dense, inventory_digest
from legacy_ddp._transport.call import Call, check_can_communicate

CHUNK_BYTES = 32 * 2**20


@internals.disable_dynamo
def broadcast(call: Call, tensors: Sequence[Named], *, kind: str, src: int) -> None:
    """Collective: give every rank the bits of rank ``src``'s tensors, of any dtype and strides.

    Raises:
        ValueError: ``src`` is not a rank of the group, or a tensor is not dense (PeerError where only some say so).
        LayoutError: ranks hold other tensors. DesyncError: another call or ``src``. Nothing is written in either case.
    """
    with announcing_failures(call):
        check_can_communicate(call)
        if isinstance(src, bool) or not isinstance(src, int) or not 0 <= src < call.groups.size:
            raise ValueError(f"src is no rank of the group: got {src!r}, expected 0 to {call.groups.size - 1}")
        for item in tensors:
            check_dense(item, kind=kind)
            call.groups.payload(item.tensor.device)
        inventory = build_inventory(tensors, kind=kind)
    agree(call, Header(layout=inventory_digest(inventory), argument=src), inventory)
    if call.groups.size == 1:
        return
    with call.phase("payload"):
        for chunk in _chunks([_writable(item.tensor) for item in tensors]):
            _broadcast_chunk(call, chunk, src)


def _broadcast_chunk(call: Call, chunk: Sequence[torch.Tensor], src: int) -> None:
    # Element by element in logical order, as bytes: strides may differ between ranks and gloo knows few dtypes.
    flat = torch.cat([tensor.reshape(-1) for tensor in chunk])
    options = call.options("Broadcast")
    options.rootRank, options.rootTensor = src, 0
    call.run(call.groups.payload(flat.device), lambda group: group.broadcast([flat.view(torch.uint8)], options))
    # The source writes its own values back: a write that only some ranks make would look like a lone weight update.
    for tensor, piece in zip(chunk, torch.split(flat, [tensor.numel() for tensor in chunk]), strict=True):
        tensor.copy_(piece.view(tensor.shape))


def _chunks(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one device and dtype together, about CHUNK_BYTES at a time, in an order that all ranks share."""
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
    """One element per memory place: an expanded dimension is written once."""
    tensor = tensor.detach()
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor
