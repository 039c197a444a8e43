"""Detection of missing ranks, and the report on what every rank does. Ranks ask each other; nothing is sent before.

``watchdog``: one per rank and group, with all of the following. ``activity``: what this process does. ``processes``:
what the kernel says of a process. ``server``, ``client``, ``addresses``: questions between ranks over TCP.
``status``: the answers. ``failure``: what ended a call. ``report``: the text. ``report_file``, ``signals``: its file.
``log_policy``: what is logged, and when. ``background``: threads.

Imported by the transport and the wrapper. Imports the log, texts and errors.
"""

from legacy_ddp._watchdog.activity import HERE, STANDING_IN, USER_CODE
from legacy_ddp._watchdog.failure import Failure
from legacy_ddp._watchdog.watchdog import Watchdog

__all__ = ["HERE", "STANDING_IN", "USER_CODE", "Failure", "Watchdog"]
