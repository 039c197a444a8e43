"""Operations of chosen steps, from the first forward pass after a call to the next call."""

from collections.abc import Collection, Sequence
from contextlib import suppress

from legacy_ddp._errors import LegacyDDPError
from legacy_ddp.debug._arguments import Target
from legacy_ddp.debug._operations.capture import OperationCapture
from legacy_ddp.debug._operations.operation import Operation


class OperationSteps:
    """The operations of the target's module in the steps with a number in ``steps``.

    No event tells of the forward passes of a plain module: a step begins with :meth:`begin`, and the record with the
    first forward pass. Each forward pass of a wrapper calls :meth:`begin_forward`.
    """

    def __init__(self, target: Target, steps: Collection[int]) -> None:
        self._has_any = False
        self._steps = steps
        self._target = target
        self._is_plain = target.wrapper is None
        self._capture = OperationCapture(target.module, counts_forwards=self._is_plain)
        self._operations: Sequence[Operation] = ()

    def __contains__(self, step: int) -> bool:
        return step in self._steps

    def missing(self, last: int) -> str:
        """Text with reason and next step if there are such steps, all without operations. ``last``: the last step."""
        if not self._steps or self._has_any:
            return ""
        if self._target.has_compiled_wrapper:
            return (
                "holds no operations: those of a compiled wrapper are not recorded; compile the module inside "
                "(wrapper.module.compile()), or record without torch.compile"
            )
        return (
            f"holds no operations: it ends with step {last}, and the recorder saw no training forward pass of the "
            f"model in the steps of operations=; choose steps of this run, or {self._advice}"
        )

    @property
    def _advice(self) -> str:
        if self._is_plain:
            return "give it the module that is called, torch.compile(module) if that is called"
        return "call the wrapper instead of its module; compile the module inside, not the wrapper"

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
