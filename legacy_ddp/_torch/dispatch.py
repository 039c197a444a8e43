"""Operations that torch's dispatcher calls: a mode that gets all of them, and the node and the caller of each."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, Final

import torch
from torch._C import _get_dispatch_stack_at, _len_torch_dispatch_stack, _pop_torch_dispatch_stack
from torch._C import _push_on_torch_dispatch_stack as _push
from torch._ops import OpOverload
from torch.autograd.graph import Node, _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from legacy_ddp._torch.tensors import frame_of, skip_tracing_below

# Gets the operation, its arguments and its keyword arguments; returns the result of the operation.
Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

current_node: Callable[[], Node | None] = torch._C._current_autograd_node
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
_MODULE_CALL: Final[CodeType] = torch.nn.Module.__call__.__code__
# Makes the first gradient, a one, before it starts the engine.
_BACKWARD_START: Final[CodeType] = torch.autograd.backward.__code__
_BACKWARD_CALL: Final[CodeType] = _engine_run_backward.__code__
_TORCH_FOLDER: Final[str] = os.path.join(os.path.dirname(torch.__file__), "")
# node_number() of every node that accumulates into a leaf.
LEAF_NUMBER = 2**64 - 1


class LowestMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """A dispatch mode below all others of a thread, so that a ``with`` block of another mode may begin or end inside.

    ``handle`` gets every operation of the thread, after the other modes. Code of torch.compile stays compiled, because
    torch's flags for modes stay unset; the mode gets the operations that compiled code calls.
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
        """Begin with the operations of the calling thread."""
        for mode in (self, *_pop_all()):
            _push(mode)

    def remove(self) -> bool:
        """Stop, in the thread of :meth:`install`. False if the mode was already removed."""
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
    """A block in which dispatch modes, function modes and subclasses get no operation."""
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
    """The nodes of a thread are numbered in the order in which they are made; see also :data:`LEAF_NUMBER`."""
    return int(node._sequence_nr())


def leaf_of(node: Node) -> torch.Tensor | None:
    """The tensor into which a node with :data:`LEAF_NUMBER` accumulates."""
    return getattr(node, "variable", None)


def caller_of_operation(names: Mapping[int, str], *, ignored: str) -> tuple[str | None, str]:
    """The name of the module that runs the present operation, and the file that calls the operation.

    ``names``: of the modules, by id. The module is the innermost one, None outside of modules. In a backward pass only
    modules that run inside of it count, as in the second forward of a checkpoint. The file is the innermost one in the
    module, outside of torch and of paths that begin with ``ignored``; empty if there is none. For the first gradient of
    a backward pass it is a file of torch.
    """
    # From the stack of the thread: hooks on modules, such as those of torch's ModuleTracker, would make torch.compile
    # split its graphs.
    handler = frame_of(_DISPATCH_CALL)
    frame, file = handler and handler.f_back, ""
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
