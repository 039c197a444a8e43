"""Capture of the operations of forward and backward of a model, as torch's dispatcher calls them."""

import threading
from collections.abc import Callable, Collection
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import nn

from legacy_ddp import _torch as internals
from legacy_ddp._collectives.observers import are_forwards_private
from legacy_ddp._errors import LegacyDDPError
from legacy_ddp.debug._operations.observer import Observer
from legacy_ddp.debug._operations.operation import Operation


class OperationCapture:
    """The operations of one thread between :meth:`start` and :meth:`stop`, in order. Also a context manager.

    Digests of inputs are taken before the operation, of outputs after it, and an input is read again although it is the
    output of an earlier operation: a write from elsewhere (a second thread, a stale pointer) shows as a difference of
    the two digests. Without a digest are:

    - inputs and outputs of views (``t``, ``view``, ``detach``), which compute nothing: their shapes, strides and
      settings are recorded; inputs of allocations, likewise;
    - memory that no operation has written to (``aten::empty`` and relatives), and destinations that an operation
      overwrites without reading (``copy_``, ``out=``) among its inputs;
    - workspaces of kernels, and outputs of collectives, which return before they have written;
    - tensors of classes with operations of their own (DTensor), quantized and meta tensors.

    Operations inside of a custom operation are not seen, nor are operations of other threads; of these, the threads of
    a CUDA model's backward pass are. In regions under torch.compile, which stay compiled (torch 2.8 compiles these once
    more, and fails in ``torch.cond``), the operations that the compiled code calls are seen, and generated kernels are
    not. Operations of this library are left out. Parameters are
    known by their memory at :meth:`start`: other tensors, given to ``functional_call``, have no names.

    The bits, generators and memory formats of the training stay the same. Other dispatch modes may be entered and left
    in between. A block of ``torch.inference_mode()`` restores the dispatch keys of its beginning: start and stop both
    inside of it or both outside.

    Args:
        module: the model. Module paths and names of parameters are from ``named_modules()`` and
            ``named_parameters()``.
        keep: positions of operations with outputs to keep in :attr:`kept`.
        counts_forwards: leave out all operations before the first in a forward pass of the model; a forward pass counts
            as a new micro-batch if it is the first, or the first after a backward pass. Otherwise
            :meth:`begin_micro_batch` counts.

    Attributes:
        kept: copies of the outputs of operations, by position.

    Example:
        >>> with OperationCapture(model) as capture:
        ...     model(inputs).sum().backward()
        >>> capture.operations[0].name
        'aten::t'
    """

    def __init__(self, module: nn.Module, *, keep: Collection[int] = (), counts_forwards: bool = False) -> None:
        self.kept: dict[int, tuple[torch.Tensor, ...]] = {}
        self.operations: list[Operation] = []
        self._make_observer = partial(Observer, module, frozenset(keep), counts_forwards=counts_forwards)
        self._mode = internals.LowestMode(self._handle)
        self._thread: int | None = None
        self._is_running = self._is_private = False
        self._observer = self._make_observer()
        self._failure: Exception | None = None

    @property
    def is_running(self) -> bool:
        """Whether the capture has started and not ended."""
        return self._is_running

    def __enter__(self) -> "OperationCapture":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.cancel()

    def start(self) -> None:
        """Begin a new record.

        Raises:
            LegacyDDPError: already started.
        """
        if self._is_running:
            raise LegacyDDPError("this capture of operations has started already, expected stop() before start()")
        self._observer, self._failure = self._make_observer(), None
        self.kept = self._observer.kept
        self._thread, self._is_running = threading.get_ident(), True
        self._is_private = are_forwards_private()  # a cross-check inside of a captured step is no part of the step
        self._mode.install()

    def begin_micro_batch(self) -> None:
        """Count a forward pass of the model, which begins now; does nothing unless started."""
        self._observer.micro_batch += 1

    def stop(self) -> list[Operation]:
        """End the record. Returns the operations, also in :attr:`operations`.

        Raises:
            LegacyDDPError: not started, or started in another thread; the capture ends nevertheless.
            Exception: the first failure to record an operation.
        """
        if not self._is_running:
            raise LegacyDDPError("this capture of operations has not started, expected start() before stop()")
        self.cancel()
        if self._failure is not None:
            raise self._failure
        with internals.unseen():
            self.operations = self._observer.operations()
        return self.operations

    def cancel(self) -> None:
        """End without a record; may be called again.

        Raises:
            LegacyDDPError: as :meth:`stop`.
        """
        if not self._is_running:
            return
        self._is_running = False  # a mode that cannot be removed passes operations on
        if not self._mode.remove():
            raise LegacyDDPError(
                "the capture of operations cannot end: its dispatch mode is not among those of this thread; start and "
                f"stop it in one thread (started in thread {self._thread}, this is thread {threading.get_ident()})"
            )

    def _handle(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the operation, and record it. A failure to record ends the record, and not the operation."""
        if are_forwards_private() != self._is_private:
            return function(*args, **kwargs)
        running = self._try(self._observer.before, function, args, kwargs)
        result = function(*args, **kwargs)
        if running is not None:
            self._try(self._observer.after, running, result)
        return result

    def _try(self, action: Callable[..., Any], *args: Any) -> Any:
        if not self._is_running or self._failure is not None:
            return None
        try:
            with internals.unseen():
                return action(*args)
        except Exception as error:  # noqa: BLE001 - tensors of a user may raise anything
            self._failure = error
            return None
