"""Runs of received batches on this rank, with or without the capture of operations."""

from collections.abc import Collection, Mapping
from contextlib import nullcontext

import torch
from torch import nn

from legacy_ddp.debug._cross_check.batch_plan import Classes
from legacy_ddp.debug._cross_check.one_run import Runner
from legacy_ddp.debug._cross_check.parcel import unknown_classes, unpack
from legacy_ddp.debug._cross_check.verdict import Digests
from legacy_ddp.debug._operations.capture import OperationCapture
from legacy_ddp.debug._operations.operation import Operation


class Passes:
    """Forward and backward passes of the batches in parcels. Every pass has a new copy of its batch.

    ``names``: of the results. ``classes``: of the batch of this rank, see
    :func:`~legacy_ddp.debug._cross_check.batch_plan.classes_in`.
    """

    def __init__(self, runner: Runner, module: nn.Module, classes: Classes) -> None:
        self.names = runner.names
        self._runner, self._module, self._classes = runner, module, classes
        self._device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))

    def check_classes(self, data: torch.Tensor) -> None:
        """Refuse a batch with an unknown class.

        Raises:
            TypeError: names the class.
        """
        if data.numel() and (unknown := unknown_classes(data, self._classes)):
            raise TypeError(
                f"the batch of another rank holds {unknown[0]}, and the batch of this rank does not: expected batches "
                "of one structure on all ranks; use the same classes on all ranks"
            )

    def run(self, data: torch.Tensor, *, with_operations: bool) -> tuple[Digests, list[Operation]]:
        """The digests of all results of a pass; the operations, empty unless captured."""
        parcel = unpack(data, self._device, self._classes)
        if not with_operations:
            return self._runner.digests(parcel, nullcontext()), []
        capture = OperationCapture(self._module)
        digests = self._runner.digests(parcel, capture)
        return digests, capture.operations

    def run_keeping(self, data: torch.Tensor, keep: Collection[int]) -> Mapping[int, tuple[torch.Tensor, ...]]:
        """The output tensors of the operations at the positions ``keep``."""
        parcel = unpack(data, self._device, self._classes)
        capture = OperationCapture(self._module, keep=keep)
        self._runner.digests(parcel, capture)
        return capture.kept
