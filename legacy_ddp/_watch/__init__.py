"""Who is missing when a rank waits too long, and where is everybody? Ranks ask each other; nothing is sent before.

``activity`` what this process does; ``processes`` what the kernel says of a process; ``addresses``, ``line`` how ranks
reach each other beside the collectives; ``report`` the text; ``report_file`` where it lies; ``watchdog`` all of them.
"""

from legacy_ddp._watch.activity import HERE, USER_CODE
from legacy_ddp._watch.watchdog import Failure, Watchdog

__all__ = ["HERE", "USER_CODE", "Failure", "Watchdog"]
