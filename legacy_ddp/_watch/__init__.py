"""Who is missing when a rank waits too long, and where is everybody? Ranks ask each other; nothing is sent before.

``activity``: what this process does. ``processes``: what the kernel says of one. ``addresses``, ``peers``, ``line``:
how ranks reach each other beside the collectives. ``inquiry``: what they say. ``failure``: what ended a call.
``report``: the text. ``report_file``: where it lies. ``voice``: what the log hears. ``watchdog``: all of them together.
"""

from legacy_ddp._watch.activity import HERE, STANDING_IN, USER_CODE
from legacy_ddp._watch.failure import Failure
from legacy_ddp._watch.watchdog import Watchdog

__all__ = ["HERE", "STANDING_IN", "USER_CODE", "Failure", "Watchdog"]
