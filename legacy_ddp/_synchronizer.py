"""What one set of parameters keeps from call to call: its plan, its seat in the group, and what it has warned of."""

import warnings
from datetime import timedelta

import torch.distributed as dist

from legacy_ddp import _torch_internals as internals
from legacy_ddp._agree import Agreement, describe_micro_batches
from legacy_ddp._call import Call, Seat
from legacy_ddp._groups import groups_of
from legacy_ddp._header import Operation
from legacy_ddp._plan import Planner
from legacy_ddp._settings import Settings


class Synchronizer:
    """What one set of parameters keeps from call to call: its plan and its seat in the group."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.planner = Planner(settings)
        self._seat: Seat | None = None
        self._warned_uneven = False
        self._warning = ""

    def call(self, operation: Operation, group: dist.ProcessGroup) -> Call:
        """The next call on ``group``. Collective if this process makes its first one there."""
        seconds = self.settings.timeout_seconds
        timeout = internals.group_timeout(group) if seconds is None else timedelta(seconds=seconds)
        groups = groups_of(group, timeout)
        if self._seat is None or self._seat.groups is not groups:
            self._seat = Seat(groups, groups.enlist())
        return Call(self._seat, operation, timeout)

    def note_uneven(self, call: Call, agreement: Agreement) -> None:
        """Prepare the warning, once per run and on rank 0, if ranks bring different numbers of micro-batches."""
        if self._warned_uneven or self.settings.checks.uneven != "warn":
            return
        if finding := describe_micro_batches(agreement.rows):
            self._warned_uneven = True
            if call.groups.rank == 0:
                self._warning = f"{call.operation} call {call.number}: ranks bring uneven work (said once):\n{finding}"

    def emit_warning(self) -> None:
        """Say what there is to say, at the line that called our caller."""
        if text := self._warning:
            self._warning = ""
            warnings.warn(f"{text}\nsee legacy_ddp.Checks(uneven=...)", stacklevel=3)
