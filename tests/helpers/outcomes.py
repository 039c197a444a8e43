"""What did a rank see of a faulty call, what did the call leave behind, and was the next one right?"""

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel

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


def bits(model: nn.Module) -> list[torch.Tensor | None]:
    """Copies of all gradients."""
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(before: list[torch.Tensor | None], after: list[torch.Tensor | None]) -> bool:
    """Whether no gradient changed, bit by bit: a NaN is equal to itself."""
    return all(a is b if a is None or b is None else _same_bits(a, b) for a, b in zip(before, after, strict=True))


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return torch.equal(*(each.detach().contiguous().flatten().view(torch.uint8) for each in (first, second)))


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
    """Nothing was raised, and training goes on."""
    for outcome in outcomes:
        assert outcome.error == "", outcome
        assert outcome.recovered
        assert outcome.prompt
