"""The parts of a step on this rank: seconds in forward passes, in backward passes, and in everything else."""

from dataclasses import dataclass, field
from time import perf_counter


@dataclass(slots=True)
class StepClock:
    """Measures three parts of the time between two calls of this rank, by the clock of the host.

    ``forward``: in forward passes of the wrapper. ``backward``: from the end of each to the last gradient that was
    added before the next, so with the loss. ``data``: everything else, such as the loading of data, the optimizer
    step and logging. ``accumulated``: the time of the last added gradient, set by the hooks of the parameters.

    Every second counts once, also if forward passes are nested. Without a forward pass, as that of a compiled
    wrapper, ``forward`` is 0, and ``backward`` begins with the end of the last call.
    """

    data: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    accumulated: float = 0.0
    _mark: float = field(default_factory=perf_counter)  # the time up to here is divided

    def begin(self) -> None:
        """A forward pass begins, or a call."""
        now, mark = perf_counter(), self._mark
        if self.accumulated > mark:
            self.backward += self.accumulated - mark
            mark = self.accumulated
        self.data += now - mark
        self._mark = now

    def end_forward(self) -> None:
        """A forward pass has ended."""
        now = perf_counter()
        self.forward += now - self._mark
        self._mark = now

    def take(self) -> tuple[float, float, float]:
        """Seconds of data, forward and backward up to the begin of the call, and begin to count again."""
        parts = self.data, self.forward, self.backward
        self.data = self.forward = self.backward = 0.0
        return parts

    def end_call(self) -> None:
        """A call has ended, and the next step begins."""
        self._mark = perf_counter()
