"""Operations as called by torch's dispatcher: a mode for all operations, and the node and the frame of each."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch._C import _get_dispatch_stack_at, _len_torch_dispatch_stack, _pop_torch_dispatch_stack
from torch._C import _push_on_torch_dispatch_stack as _push
from torch._ops import OpOverload
from torch.autograd.graph import Node, _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from legacy_ddp._torch.tensors import skip_tracing_below

# The operation, its arguments, its keyword arguments; returns the result of the operation.
Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

current_node: Callable[[], Node | None] = torch._C._current_autograd_node
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
_MODULE_CALL: Final[CodeType] = torch.nn.Module.__call__.__code__
# Makes the first gradient, a one, before the pass of the engine.
_BACKWARD_START: Final[CodeType] = torch.autograd.backward.__code__
_BACKWARD_CALL: Final[CodeType] = _engine_run_backward.__code__
_TORCH_FOLDER: Final[str] = os.path.join(os.path.dirname(torch.__file__), "")
# The number of every node that accumulates into a leaf.
LEAF_NUMBER = 2**64 - 1


class LowestMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """A dispatch mode below all others of a thread, so that a ``with`` block of another mode may begin or end inside.

    ``handle`` gets every operation of the thread, after the other modes. Code of torch.compile stays compiled: the mode
    sees the operations called by compiled code. Torch's flags for modes stay unset, because with them the compiler
    takes another path.
    """

    supports_higher_order_operators = True

    def __init__(self, handle: Handler) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._handle = handle

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise the first operation imports the compiler

    @skip_tracing_below
    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._handle(func, args, kwargs or {})

    def install(self) -> None:
        """Begin to see the operations of the calling thread."""
        modes = _pop_all()
        for mode in (self, *modes):
            _push(mode)

    def remove(self) -> bool:
        """Stop, in the thread of :meth:`install`. Whether the mode was still there."""
        modes = _pop_all()
        for mode in modes:
            if mode is not self:
                _push(mode)
        return any(mode is self for mode in modes)


_DISPATCH_CALL: Final[CodeType] = LowestMode.__torch_dispatch__.__code__


def _pop_all() -> list[TorchDispatchMode]:
    modes = [_get_dispatch_stack_at(index) for index in range(_len_torch_dispatch_stack())]
    for _ in modes:
        _pop_torch_dispatch_stack(None)
    return modes


@contextmanager
def unseen() -> Iterator[None]:
    """A block of operations unseen by dispatch modes, function modes and subclasses."""
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Whether the class of the tensor handles operations itself, as a DTensor or a fake tensor does."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def wraps_others(tensor: torch.Tensor) -> bool:
    """Whether the tensor has no memory of its own, because its class computes with other tensors."""
    if not has_own_dispatch(tensor) or not tensor.numel():
        return False
    try:
        return not tensor.untyped_storage().data_ptr()
    except RuntimeError:  # of torch, for the address of such a tensor
        return True


def schema_of(function: Callable[..., Any]) -> torch.FunctionSchema | None:
    return function._schema if isinstance(function, OpOverload) else None


def tags_of(function: Callable[..., Any]) -> Sequence[torch.Tag]:
    return function.tags if isinstance(function, OpOverload) else ()


def operation_name(schema: torch.FunctionSchema) -> str:
    """The name with the overload, as ``aten::add.Tensor``."""
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def node_number(node: Node) -> int:
    """Nodes of a thread are numbered in the order of their making; nodes of leaves have :data:`LEAF_NUMBER`."""
    return int(node._sequence_nr())


def leaf_of(node: Node) -> torch.Tensor | None:
    """The tensor of a node with :data:`LEAF_NUMBER`, which accumulates into it."""
    return getattr(node, "variable", None)


def caller_of_operation(names: Mapping[int, str], *, ignored: str) -> tuple[str | None, str]:
    """The module that runs the present operation, by the ids in ``names``, and the file that calls the operation.

    The module is the innermost module, None outside. A backward pass ends the search: inside of a backward pass only
    its own modules count, as in the second forward of a checkpoint. The file has the innermost code in the module,
    outside of torch and of files with a path that begins with ``ignored``; empty without code of this kind. For the
    first gradient of a backward pass it is a file of torch, whichever code begins the pass.

    Reads the stack of the thread: hooks on modules would make torch.compile split its graphs, and torch's
    ModuleTracker, which registers such hooks, knows the names of classes only.
    """
    frame, file = _operation_frame(), ""
    skipped = (_TORCH_FOLDER, __file__, ignored)
    while frame is not None and frame.f_code is not _BACKWARD_CALL:
        code = frame.f_code
        if code is _MODULE_CALL:
            name = names.get(id(frame.f_locals["self"]))
            if name is not None:
                return name, file
        elif not file and (code is _BACKWARD_START or not code.co_filename.startswith(skipped)):
            file = code.co_filename
        frame = frame.f_back
    return None, file


def _operation_frame() -> FrameType | None:
    """The innermost frame outside of the handler of a :class:`LowestMode`; None in a thread without Python code."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _DISPATCH_CALL:
            return frame.f_back
        frame = frame.f_back
    return None
