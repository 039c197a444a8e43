"""The rules for optimizer steps on the parameters of one counter."""

import threading
from dataclasses import dataclass, field


@dataclass(slots=True)
class StepPolicy:
    """Whether steps are guarded, and which ``no_sync()`` blocks are open.

    ``has_leaves``: gradients were removed from ``.grad`` to be summed, and wait for the call. ``has_local_steps``: a
    step inside a ``no_sync()`` block has used gradients since the last call.
    """

    guarded: bool
    has_leaves: bool = False
    has_local_steps: bool = False
    block_thread: int = 0  # of the outermost no_sync() block
    _open_blocks: int = 0  # a number, not a state to restore: blocks of two threads end in any order
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def sync_enabled(self) -> bool:
        """Whether no ``no_sync()`` block is open in any thread."""
        return self._open_blocks == 0

    def open_block(self) -> bool:
        """Count a ``no_sync()`` block. Returns whether the block is the outermost block."""
        with self._lock:
            self._open_blocks += 1
            if self._open_blocks > 1:
                return False
            self.block_thread = threading.get_ident()
            return True

    def close_block(self) -> None:
        """A ``no_sync()`` block ended."""
        with self._lock:
            self._open_blocks -= 1
