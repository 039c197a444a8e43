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

    ``numbers``: of these passes. ``forwards``: forward passes of the wrapper with gradients enabled, since the last
    call, or since the forward before the first pass after an exception. ``has_nested``: one of the passes since the
    last call ran inside of another pass.
    """

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        self.forwards = 0
        self.has_nested = False

    def begin(self, number: int) -> int:
        """The first hook of pass ``number`` runs. The number, -1 outside of a pass and in a compiled pass."""
        if number >= 0:
            if internals.inside_compiled_backward():
                return -1
            # Asked first: after an exception between both statements nobody knows the pass, which has not ended.
            internals.at_end_of_backward(partial(self.numbers.discard, number))
            is_nested, is_retry = internals.inside_function_backward(), bool(self.numbers)
            self.numbers.add(number)
            self.has_nested = self.has_nested or is_nested
            if is_retry and not is_nested:
                self.forwards = min(self.forwards, 1)
        return number

    @property
    def last_open(self) -> int:
        """The number of the last open pass, -1 without one."""
        return max(self.numbers, default=-1)

    def has_failed_since(self, first: int, number: int) -> bool:
        """Whether a pass from ``first`` on, and before ``number``, is open."""
        return first >= 0 and any(first <= other < number for other in tuple(self.numbers))

    def forget(self) -> None:
        """A call has reduced the gradients, or the gradients are dropped."""
        self.numbers.clear()
        self.forwards, self.has_nested = 0, False


def check_complete(incomplete: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuse gradients with a part of a pass that an exception has ended. ``incomplete``: their names and gradients.

    Raises:
        GradientError: a gradient is not zero.
    """
    if not incomplete:
        return
    names = [name for name, _ in incomplete]
    found = list(compress(names, which_nonzero([grad for _, grad in incomplete])))
    if found:
        raise GradientError(
            f"an exception ended a backward() half-way since the last call: gradients of {len(found)} parameters, "
            f"first {found[0]!r}, are from this pass or from before it, and a part of the pass is missing; call "
            "zero_grad() and do the step again from its first micro-batch, or call zero_grad() and leave this rank out "
            "with skip=True or sample_size=0",
            parameter=found[0],
        )
