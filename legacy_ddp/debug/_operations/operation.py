"""The record of an operation: its place in the model, its arguments, and the digests of its tensors. Pure."""

from dataclasses import dataclass, field
from typing import Literal

Stage = Literal["forward", "backward", "after backward"]
"""``after backward`` is no stage of a trace: :func:`with_after_backward` tells it from the operations before."""


@dataclass(frozen=True)
class Value:
    """A tensor that an operation read or wrote.

    ``kind``: dtype and shape, as ``float32 (8, 10)``. ``layout``: empty for a contiguous tensor on the CPU, otherwise
    strides and device as text. ``digest``: 16 hexadecimal digits of the bits in row-major order
    (:func:`legacy_ddp.debug.digest`); None without defined content (the output of ``aten::empty``), or for a
    tensor without a digest.
    """

    kind: str
    layout: str
    digest: str | None


@dataclass(frozen=True)
class Operation:
    """An operation of forward or backward, as it ran on one rank.

    ``name``: with the overload, as ``aten::add.Tensor``. ``stage``: ``backward`` inside of autograd's backward pass,
    otherwise ``forward``. ``micro_batch``: number of the forward pass of the model in this step, from 1; 0 before the
    first. ``module``: path of the innermost module of the model, as ``encoder.layers.3.linear1``; for the backward pass
    the module whose forward pass made the node; empty outside of modules (the loss) and in the model itself.
    ``parameters``: for each input the name of the parameter or buffer that it is, or is a view of; empty for another
    tensor. ``inputs``: tensors in the order of arguments, as they were before the operation. ``outputs``: returned
    tensors, and inputs that the operation changed. ``settings``: all other arguments as text. ``generator``: 16
    hexadecimal digits for the random generator's state before a random operation, otherwise empty.

    ``number``: the place in the order of execution, in every text about operations. 1 is the first operation of the
    step in a forward pass of the model, or the first of all if none is in a forward pass. 0 stands for all operations
    before (the preparation of a batch), which a trace does not hold.
    """

    name: str
    stage: Stage
    micro_batch: int
    module: str
    parameters: tuple[str, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    settings: str
    generator: str
    number: int = field(default=0, compare=False, repr=False)
