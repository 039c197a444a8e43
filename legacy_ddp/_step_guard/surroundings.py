"""What surrounds a call and may explain that ranks part: ``no_sync()`` blocks, and the closure of an optimizer step.

Looked for only where a report or an error is written: a call without a fault pays nothing.
"""

import sys
from collections.abc import Iterable, Iterator
from types import FrameType

import torch

from legacy_ddp._log import INNER, outward
from legacy_ddp._step_guard.backward_counter import StepPolicy, policies

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
