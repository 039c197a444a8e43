"""Operations of chosen steps, from the first forward pass after a call to the next call."""

from collections.abc import Collection, Sequence
from contextlib import suppress

from torch import nn

from legacy_ddp._errors import LegacyDDPError
from legacy_ddp.debug._operations.capture import OperationCapture
from legacy_ddp.debug._operations.operation import Operation


class OperationSteps:
    """The operations of ``module`` in the steps with a number in ``steps``.

    ``is_plain``: no event tells of the forward passes of the module: a step begins with :meth:`begin`, and the record
    with the first forward pass. Otherwise each forward pass calls :meth:`begin_forward`.
    """

    def __init__(self, module: nn.Module, steps: Collection[int], *, is_plain: bool) -> None:
        self._has_any = False
        self._steps = steps
        self._is_plain = is_plain
        self._capture = OperationCapture(module, counts_forwards=is_plain)
        self._operations: Sequence[Operation] = ()

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    @property
    def are_missing(self) -> bool:
        """Whether there are such steps, all without operations so far."""
        return bool(self._steps) and not self._has_any

    def begin(self, step: int) -> None:
        """A step begins.

        Raises:
            LegacyDDPError: as :meth:`OperationCapture.start`.
        """
        if self._is_plain and step in self._steps and not self._capture.is_running:
            self._capture.start()

    def begin_forward(self, step: int) -> None:
        """A forward pass of a step begins: start the record at the first, and count the micro-batch.

        Raises:
            LegacyDDPError: as :meth:`OperationCapture.start`.
        """
        if step not in self._steps:
            return
        if not self._capture.is_running:
            self._capture.start()
        self._capture.begin_micro_batch()

    def end_backward(self) -> None:
        """Before the exchange: end the record. After a call that failed, the next forward pass begins a new one.

        Raises:
            Exception: as :meth:`OperationCapture.stop`.
        """
        if self._capture.is_running:
            self._operations = self._capture.stop()

    def take(self) -> Sequence[Operation]:
        """The operations of the step, which ends."""
        found, self._operations = self._operations, ()
        self._has_any |= bool(found)
        return found

    def cancel(self) -> None:
        """End the record, if there is one, without operations. In another thread the record ends as well."""
        with suppress(LegacyDDPError):
            self._capture.cancel()
        self._operations = ()
