"""Backward passes that an exception has ended half-way: a part of the gradients is there, the rest is missing.

The engine of autograd calls a function at the end of a pass if the pass has asked for it, and if no exception ends the
pass. So the first hook of a pass asks for such a call, and a pass without this call stays open. A later pass has a
larger number.
"""

from collections.abc import Sequence
from functools import partial
from itertools import compress

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._errors import GradientError
from legacy_ddp._torch.device import which_nonzero


class OpenPasses:
    """The passes over the parameters of one counter that have begun and not ended.

    ``has_nested``: one of the passes since the last call ran inside of another pass.
    """

    def __init__(self) -> None:
        self._numbers: set[int] = set()
        self.has_nested = False

    def enter(self) -> int:
        """A hook runs. The number of the pass that called it, -1 outside of a pass."""
        number = internals.current_backward()
        if number >= 0 and number not in self._numbers:
            # Asked first: after an exception between both statements nobody knows the pass, which has not ended.
            internals.at_end_of_backward(partial(self._numbers.discard, number))
            self._numbers.add(number)
            self.has_nested = self.has_nested or internals.inside_function_backward()
        return number

    @property
    def last_open(self) -> int:
        """The number of the last open pass, -1 without one."""
        return max(self._numbers, default=-1)

    def forget(self) -> None:
        """A call has reduced the gradients, or the gradients are dropped."""
        self._numbers.clear()
        self.has_nested = False


def check_complete(incomplete: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuse gradients with a part of a pass that an exception has ended. ``incomplete``: their names and gradients.

    Raises:
        GradientError: a gradient is not zero.
    """
    names = [name for name, _ in incomplete]
    found = list(compress(names, which_nonzero([grad for _, grad in incomplete])))
    if found:
        raise GradientError(
            f"an exception ended a backward() half-way since the last call, so gradients are missing: {len(found)} "
            f"parameters, first {found[0]!r}, still hold a gradient of this pass or from before it; call zero_grad() "
            "and do the step again from its first micro-batch, or call zero_grad() and leave this rank out with "
            "skip=True or sample_size=0",
            parameter=found[0],
        )
