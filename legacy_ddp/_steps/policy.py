"""The present step of a counter: open blocks, its backward passes and its times, and what may explain that ranks part.

The engine of autograd calls a function at the end of a backward pass if the pass has asked for it, and if no exception
ends the pass. So the first hook of a pass asks for such a call, and a pass without this call stays open: a part of its
gradients is there, the rest is missing. A later pass has a larger number.

What surrounds a call (``no_sync()`` blocks, the closure of an optimizer step) is looked for only where a report or an
error is written: a call without a fault pays nothing.
"""

import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from threading import get_ident
from time import perf_counter
from types import FrameType

import torch

from legacy_ddp import _torch as internals
from legacy_ddp._errors import GradientError
from legacy_ddp._log import INNER, outward
from legacy_ddp._torch.device import which_nonzero


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
    mark: float = field(default_factory=perf_counter)  # the time up to here is divided

    def begin(self) -> None:
        now, mark = perf_counter(), self.mark
        if self.accumulated > mark:
            self.backward += self.accumulated - mark
            mark = self.accumulated
        self.data += now - mark
        self.mark = now

    def end_forward(self) -> None:
        now = perf_counter()
        self.forward += now - self.mark
        self.mark = now


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
        return max(self.numbers, default=-1)

    def has_failed_since(self, first: int, number: int) -> bool:
        """Whether a pass from ``first`` on, and before ``number``, is open."""
        return first >= 0 and any(first <= other < number for other in tuple(self.numbers))


def check_complete(incomplete: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Refuse gradients with a part of a pass that an exception has ended. ``incomplete``: their names and gradients."""
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


policies: "list[weakref.ref[StepPolicy]]" = []  # of every counter that exists


@dataclass(slots=True, eq=False, weakref_slot=True)
class StepPolicy:
    """Whether steps are guarded, which ``no_sync()`` blocks are open, and the parts of the present step.

    ``module_class``: of the wrapped module, empty for parameters without one. ``has_leaves``: gradients were removed
    from ``.grad`` to be summed, and wait for the call. ``has_local_steps``: a step inside a ``no_sync()`` block has
    used gradients since the last call. ``has_stepped_locally``: the same, until a check has counted the step.
    ``idle_calls``: the calls inside such blocks since then. ``passes``: that an exception has ended, or that still run.
    """

    guarded: bool
    module_class: str = ""
    has_leaves: bool = False
    has_local_steps: bool = False
    has_stepped_locally: bool = False
    idle_calls: int = 0
    passes: OpenPasses = field(default_factory=OpenPasses)
    clock: StepClock = field(default_factory=StepClock)
    # The thread of each open no_sync() block, the outermost first. Blocks of two threads end in any order. The steps of
    # a dictionary need no lock, and may be repeated after an exception.
    open_blocks: dict[object, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        policies.append(weakref.ref(self, policies.remove))

    @property
    def sync_enabled(self) -> bool:
        """Whether no ``no_sync()`` block is open in any thread."""
        return not self.open_blocks

    @property
    def block_thread(self) -> int:
        """The thread of the outermost ``no_sync()`` block, 0 without one."""
        return next(iter(tuple(self.open_blocks.values())), 0)

    def open_block(self, block: object) -> bool:
        """Note a ``no_sync()`` block. Returns whether the block is the outermost block."""
        self.open_blocks[block] = get_ident()
        return next(iter(tuple(self.open_blocks))) is block

    def close_block(self, block: object) -> None:
        """A ``no_sync()`` block has ended, or was not opened."""
        self.open_blocks.pop(block, None)


_OF_TORCH = sys.modules[torch.optim.LBFGS.__module__].__file__ or ""


def closure_owner(frames: Iterable[FrameType] | None = None) -> str:
    """``LBFGS``: the class of the optimizer whose ``step()`` runs a closure in ``frames``, the innermost first; without
    them, in the calling thread.

    Empty without one, and for an optimizer of torch that runs its closure once, whatever loss the closure returns.
    """
    for frame in outward(sys._getframe(1)) if frames is None else frames:
        code = frame.f_code
        owner = type(frame.f_locals.get("self")) if code.co_name == "step" else object
        if issubclass(owner, torch.optim.Optimizer):
            arguments = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
            runs_closure = any(callable(frame.f_locals.get(name)) for name in arguments)
            is_once = code.co_filename.startswith(INNER) and code.co_filename != _OF_TORCH
            return owner.__name__ if runs_closure and not is_once else ""
    return ""


def closure_advice(ranks: str, owner: str) -> str:
    """What to do about a closure that returns a loss of its own on each rank. ``owner``: of the closure."""
    return (
        f"{ranks} made the call in the closure of {owner}.step(), which decides by the loss how often it runs the "
        "closure: the closure must return the mean loss, equal on all ranks: "
        "record = model.all_reduce(metrics={'loss': loss}), then record.metrics['loss'] / world size"
    )


def local_work() -> dict[str, str]:
    """The open ``no_sync()`` blocks of this process, and the calls inside such blocks, which did nothing, since the
    last call of their wrapper; by what they are, for a comparison of ranks."""
    open_blocks = [_of(policy) for policy in _known() if not policy.sync_enabled]
    idle_calls = {f"calls inside no_sync(){_of(policy)}": policy.idle_calls for policy in _known() if policy.idle_calls}
    blocks = {f"no_sync(){name}": "an open block" for name in open_blocks}
    return {**blocks, **{name: f"{number}, which did nothing" for name, number in idle_calls.items()}}


def local_work_text() -> str:
    """:func:`local_work` in a phrase: ``no_sync(): an open block``."""
    return ", ".join(f"{name}: {state}" for name, state in local_work().items())


def _known() -> Iterator[StepPolicy]:
    return (policy for reference in tuple(policies) if (policy := reference()) is not None)


def _of(policy: StepPolicy) -> str:
    return f" of {policy.module_class}" if policy.module_class else ""
