"""Detection of missing ranks: a status server on every rank, polls between ranks, and reports."""

from legacy_ddp._watchdog.client import Failure
from legacy_ddp._watchdog.ending import await_turn, end_after, forget_turn
from legacy_ddp._watchdog.process import FORWARD, OUT_OF_DATA, USER_CODE, process_activity
from legacy_ddp._watchdog.watchdog import Watchdog

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
