"""Progress of the training on stderr, from a single rank: a bar on a terminal, about ten lines elsewhere."""

import math
import shutil
import sys
from typing import Any

MAX_COLUMNS = 80


class Progress:
    """Shows nothing unless ``visible``. Without tqdm, lines also on a terminal."""

    def __init__(self, done: int, steps: int, *, visible: bool) -> None:
        self._steps = steps
        self._steps_per_line = max(1, math.ceil((steps - done) / 10))
        self._visible = visible
        self._bar = open_bar(done, steps) if visible and sys.stderr.isatty() else None

    def show(self, done: int, bits: float) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(f"{bits:.2f} bits/byte", refresh=False)
            self._bar.update()
        elif self._visible and (done % self._steps_per_line == 0 or done == self._steps):
            print(f"step {done:5d} of {self._steps}   {bits:.2f} bits/byte", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def open_bar(done: int, steps: int) -> Any:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return None
    return tqdm(initial=done, total=steps, ncols=min(MAX_COLUMNS, shutil.get_terminal_size().columns), file=sys.stderr)
