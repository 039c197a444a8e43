"""Detection of missing ranks: a status server on every rank, polls between ranks, and reports."""

from legacy_ddp._watchdog.activity import OUT_OF_DATA, USER_CODE, process_activity
from legacy_ddp._watchdog.ending import await_turn, end_after
from legacy_ddp._watchdog.failure import Failure
from legacy_ddp._watchdog.watchdog import Watchdog

__all__ = ["OUT_OF_DATA", "USER_CODE", "Failure", "Watchdog", "await_turn", "end_after", "process_activity"]
