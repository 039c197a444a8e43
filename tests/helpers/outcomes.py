"""What a rank saw of a faulty call, what the call left behind, and whether the next one was right."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch._C._distributed_c10d import ProcessGroupGloo

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel
from tests.helpers.cases import Grads, all_bits
from tests.helpers.cases import get_gradients as bits
from tests.helpers.host_sockets import changed

# The exchanges of this rank, seen from outside: collectives of gloo, and messages between the ranks of a host


# A group that the process makes itself is called through these methods; torch's own functions pass them by.
_COLLECTIVES = (
    "allgather",
    "allreduce",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "reduce_scatter",
)
# The first byte of a message between the ranks of a host. The others tell of a failure.
_MESSAGES = {b"R": "row", b"B": "barrier", b"M": "memory"}


@contextmanager
def watch_exchanges(watcher: Callable[[str], object]) -> Iterator[None]:
    """Call ``watcher(kind)`` before each exchange that this rank starts.

    ``kind``: the name of the collective on a private group; ``row``, ``barrier`` or ``memory`` for the message to one
    rank of the host. A watcher may raise: the exchange then does not start.
    """

    def send(original: Callable[..., int], sender: socket.socket, data: Any, *arguments: Any) -> int:
        first = bytes(data[0] if isinstance(data, list) else data)[:1]
        if first in _MESSAGES:
            watcher(_MESSAGES[first])
        return original(sender, data, *arguments)

    collectives = {name: _watched(name, watcher) for name in _COLLECTIVES}
    with patch.multiple(ProcessGroupGloo, **collectives), changed("send", send), changed("sendmsg", send):
        yield


def kinds_of(action: Callable[[], object]) -> list[str]:
    """The kinds of all exchanges that ``action()`` starts on this rank, in their order."""
    kinds: list[str] = []
    with watch_exchanges(kinds.append):
        action()
    return kinds


def _watched(collective: str, watcher: Callable[[str], object]) -> Callable[..., Any]:
    method = getattr(ProcessGroupGloo, collective)

    def call(*args: Any, **kwargs: Any) -> Any:
        watcher(collective)
        return method(*args, **kwargs)

    return call


# The header finds a fault as soon as all ranks have arrived; nobody may wait for a timeout, which is half an hour here.
PROMPT_SECONDS = 5.0


class Outcome(NamedTuple):
    """What a rank saw of a call, and whether the next one was right. ``error``: its type, empty if there was none."""

    error: str
    ranks: tuple[int, ...]
    text: str
    untouched: bool
    recovered: bool
    prompt: bool = True


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))


def backward(model: nn.Module, value: float) -> None:
    """One micro-batch of ``value``."""
    model(torch.full((1, 2), value)).sum().backward()


def attempt(action: Callable[[], object]) -> LegacyDDPError | ValueError | None:
    """What ``action`` raises."""
    try:
        action()
    except (LegacyDDPError, ValueError) as error:
        return error
    return None


def same(before: Grads, after: Grads) -> bool:
    """Whether no gradient changed, bit by bit: a NaN is equal to itself."""
    return all_bits(before) == all_bits(after)


def next_call_is_right(model: LegacyDistributedDataParallel, rank: int) -> bool:
    """Whether every trainable parameter gets the mean of the ranks' numbers, which is exact for so small ones."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.zero_grad()
    for parameter in trainable:
        parameter.grad = torch.full_like(parameter, float(rank))
    model.all_reduce()
    size = model.process_group.size()
    mean = torch.tensor(sum(range(size))) / size
    return all(p.grad is not None and torch.equal(p.grad, mean.to(p.dtype).expand_as(p)) for p in trainable)


def outcome_of(
    model: LegacyDistributedDataParallel,
    rank: int,
    action: Callable[[], object],
    mend: Callable[[], object] = lambda: None,
) -> Outcome:
    """Try ``action``; after an error, ``mend`` what the user would mend, and go on."""
    before = bits(model)
    start = time.monotonic()
    error = attempt(action)
    prompt = time.monotonic() - start < PROMPT_SECONDS
    untouched = same(before, bits(model))
    if error is not None:
        mend()
    ranks = error.ranks if isinstance(error, LegacyDDPError) else ()
    kind, text = ("", "") if error is None else (type(error).__name__, str(error))
    return Outcome(kind, ranks, text, untouched, next_call_is_right(model, rank), prompt)


def check_agreed(outcomes: list[Outcome], error: str, ranks: tuple[int, ...], *words: str) -> None:
    """All ranks tell the same story at once, it is the right one, and nothing was harmed."""
    first = outcomes[0]
    assert all(outcome == first for outcome in outcomes), outcomes
    assert (first.error, first.ranks) == (error, ranks), first
    assert all(word in first.text for word in words), first.text
    assert first.untouched
    assert first.recovered
    assert first.prompt


def check_silent(outcomes: list[Outcome]) -> None:
    for outcome in outcomes:
        assert outcome.error == "", outcome
        assert outcome.recovered
        assert outcome.prompt
