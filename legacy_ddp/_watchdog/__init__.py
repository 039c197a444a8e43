"""Detection of missing ranks: a status server on every rank, polls between ranks, and reports."""

from typing import TYPE_CHECKING

from legacy_ddp._errors import lazy_names

# These modules import torch, which the command needs as little as it needs anything but ``local``.
if TYPE_CHECKING:
    from legacy_ddp._watchdog.client import Failure
    from legacy_ddp._watchdog.ending import await_turn, end_after, forget_turn
    from legacy_ddp._watchdog.process import FORWARD, OUT_OF_DATA, USER_CODE, process_activity
    from legacy_ddp._watchdog.watchdog import Watchdog
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "FORWARD": "legacy_ddp._watchdog.process",
            "OUT_OF_DATA": "legacy_ddp._watchdog.process",
            "USER_CODE": "legacy_ddp._watchdog.process",
            "Failure": "legacy_ddp._watchdog.client",
            "Watchdog": "legacy_ddp._watchdog.watchdog",
            "await_turn": "legacy_ddp._watchdog.ending",
            "end_after": "legacy_ddp._watchdog.ending",
            "forget_turn": "legacy_ddp._watchdog.ending",
            "process_activity": "legacy_ddp._watchdog.process",
        },
    )

__all__ = [
    "FORWARD",
    "OUT_OF_DATA",
    "USER_CODE",
    "Failure",
    "Watchdog",
    "await_turn",
    "end_after",
    "forget_turn",
    "process_activity",
]
