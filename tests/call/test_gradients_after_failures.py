"""What a failed exchange leaves of the gradients: every gradient as it was, or none at all, and never a mixture.

An exchange fails on rank 1, as from a broken transport or from Ctrl-C; rank 0 loses its peer. Agreed errors change no
gradient: tests/ranks/test_precedence.py. Ranks that die are in tests/watchdog/test_lost_ranks.py.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import torch.distributed as dist

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.outcomes import backward, bits, same, small_net, watch_exchanges
from tests.helpers.ranks import run_ranks


class BrokenLinkError(RuntimeError):
    """What the transport raises on the rank at fault."""


class Case(NamedTuple):
    """``exchange``: the number of the exchange that fails on rank 1, from 0. ``left``: of the gradients, with gloo.

    ``metrics``, ``skips``: whether the ranks bring metrics, and whether rank 0 skips.
    """

    exchange: int
    left: str
    metrics: bool = False
    skips: bool = False


# Over gloo a rank writes to its own memory alone, and only in the payload.
_CASES = {
    "header": Case(0, "untouched"),
    "metrics": Case(1, "untouched", metrics=True),
    "kinds of gradients": Case(1, "untouched", skips=True),
    "payload": Case(1, "none"),
    "payload after zeros": Case(2, "none", skips=True),
}
_ERRORS = {"BrokenLinkError": BrokenLinkError, "KeyboardInterrupt": KeyboardInterrupt}


class Seen(NamedTuple):
    """``gradients``: none, untouched or changed. ``later``: the error of the next two calls, which leave them so."""

    error: str
    gradients: str
    later: str


def _play(rank: int) -> dict[str, Seen]:
    return {
        f"{error} in {name}": _play_case(rank, case, _ERRORS[error])
        for error in _ERRORS
        for name, case in _CASES.items()
    }


def _play_case(rank: int, case: Case, error_class: type[BaseException]) -> Seen:
    group = dist.new_group()
    model = LegacyDistributedDataParallel(small_net(), process_group=group)
    call = partial(model.all_reduce, metrics={"loss": 1.0} if case.metrics else None)
    for _ in range(2):
        model.zero_grad()
        backward(model, 1.0)
        call()
    model.zero_grad()
    backward(model, 1.0 + rank)
    if case.skips:
        call = partial(call, skip=rank == 0)
    before = bits(model)
    error = _raised(call, case.exchange if rank == 1 else None, error_class)
    gradients = _compare(before, bits(model))
    later = {_raised(model.all_reduce) for _ in range(2)}
    return Seen(
        error, gradients, " and ".join(sorted(later)) if _compare(before, bits(model)) == gradients else "changed"
    )


def _raised(
    call: Callable[[], Any], fails: int | None = None, error_class: type[BaseException] = BrokenLinkError
) -> str:
    """The error of a call in which the exchange with this number fails, or none."""
    numbers = count()

    def watch(_: str) -> None:
        if next(numbers) == fails:
            raise error_class("broken on purpose")

    try:
        with watch_exchanges(watch):
            call()
    except BaseException as error:  # noqa: BLE001 - also an interrupt
        return type(error).__name__
    return ""


def _compare(before: list[Any], after: list[Any]) -> str:
    if all(grad is None for grad in after):
        return "none"
    return "untouched" if same(before, after) else "changed"


def test_a_failed_exchange_leaves_all_gradients_or_none_on_every_rank(transport: str) -> None:
    # Abandoned operations of gloo may keep a process until their time is over.
    seen = run_ranks(_play, 2, fresh=True, survivors_exit=False)

    # Ranks of one host may write to each other's gradients from the header on.
    left = {name: "none" if transport == "host" else case.left for name, case in _CASES.items()}
    for rank, of_rank in enumerate(seen):
        assert of_rank == {
            f"{error} in {name}": Seen(error if rank == 1 else "PeerLostError", left[name], "LostPeerError")
            for error in _ERRORS
            for name in _CASES
        }
