"""Gradients clipped or unscaled between backward and the call are told once, on all ranks."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from legacy_ddp import Checks, LegacyDDPError, LegacyDistributedDataParallel, all_reduce_gradients
from tests.helpers import logged_warnings
from tests.helpers.clean_edits import draw, make_net
from tests.helpers.ranks import run_ranks
from tests.helpers.shared_jobs import on_ranks, once, run_cases

STEPS = 12  # the latest edit is told in call 10
Told = list[tuple[int, str]]  # the number of the call, and the text


@dataclass
class Loop:
    """A training with default checks, on data of the rank's own."""

    rank: int
    checks: Any = "info"
    learning_rate: float = 0.01
    is_function: bool = False

    def __post_init__(self) -> None:
        self.model: Any = make_net()
        self.call = partial(all_reduce_gradients, self.model)
        if not self.is_function:
            self.model = LegacyDistributedDataParallel(self.model, checks=self.checks)
            self.call = self.model.all_reduce
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=self.learning_rate)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
        torch.manual_seed(100 + self.rank)

    @property
    def grads(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]

    def backward(self) -> None:
        self.scaler.scale(self.model(draw(self.rank)).square().mean()).backward()

    def step(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def run(self, before: Callable[["Loop"], object]) -> Told:
        """Train; ``before`` the call of every step. Ends with the first error."""
        told: Told = []
        for call in range(1, STEPS + 1):
            self.backward()
            before(self)
            try:
                self.call()
            except LegacyDDPError as error:
                return [*told, (call, f"{type(error).__name__} {error.ranks} {error}")]
            told += [(call, text) for text in logged_warnings.take()]
            self.step()
        return told


def clip_norm(loop: Loop, **options: Any) -> None:
    """A clip that binds in every step."""
    clip_grad_norm_(loop.model.parameters(), 1e-3, **options)


HEADLINE = "gradients changed between backward and the call:"


# What is done before each call, the words of the report, and the latest call that tells.
FAULTS: dict[str, tuple[Callable[[Loop], object], str, int]] = {
    "clipped by norm": (clip_norm, "clipped by norm", 10),
    "clipped by norm, one by one": (lambda loop: clip_norm(loop, foreach=False), "clipped by norm", 10),
    "clipped by value": (lambda loop: clip_grad_value_(loop.model.parameters(), 1e-4), "clipped by value", 3),
    "unscaled": (lambda loop: loop.scaler.unscale_(loop.optimizer), "unscaled by a GradScaler", 2),
    "unscaled and clipped": (
        lambda loop: (loop.scaler.unscale_(loop.optimizer), clip_norm(loop)),
        "unscaled by a GradScaler",
        2,
    ),
}
NAMES = {(0,): "rank 0", (0, 1): "ranks 0-1"}
# A rank that unscales alone has other gradients in its step.
DIVERGES = Checks(divergence="ignore")


def _edits(rank: int, name: str, who: tuple[int, ...], checks: Any = DIVERGES) -> Told:
    return Loop(rank, checks, learning_rate=1e-4).run(FAULTS[name][0] if rank in who else id)


@once
def _told(world_size: int, who: tuple[int, ...], checks: Any = DIVERGES) -> dict[str, list[Told]]:
    """What each edit of ``who`` brings, in one job: every wrapper warns for itself."""
    return run_cases(_edits, world_size, {name: (name, who, checks) for name in FAULTS})


@pytest.mark.cpu("a device finds edits with edited='raise' alone")
@pytest.mark.parametrize("world_size, who", [(2, (0, 1)), (3, (0,))])
@pytest.mark.parametrize("name", FAULTS)
def test_an_edit_before_the_call_is_told_once_on_all(name: str, world_size: int, who: tuple[int, ...]) -> None:
    first, *others = _told(world_size, who)[name]
    _, words, latest = FAULTS[name]

    assert others == [first] * (world_size - 1)
    ((call, text),) = first
    assert call <= latest
    assert text.startswith(f"all_reduce() call {call}: {HEADLINE}\n")
    assert f"  {NAMES[who]}: {words}" in text
    assert "clip and unscale after all_reduce()" in text
    assert "(warned once)" in text
    assert all(len(line) <= 80 for line in text.splitlines()), text


@pytest.mark.parametrize("name", FAULTS)
def test_an_edit_can_be_an_error_on_all_ranks(name: str) -> None:
    first, *others = _told(3, (1,), Checks(edited="raise", divergence="ignore"))[name]

    assert others == [first] * 2
    ((call, text),) = first
    assert call <= FAULTS[name][2]
    assert text.startswith(f"EditedGradientError (1,) all_reduce() call {call}: {HEADLINE}\n")


@pytest.mark.parametrize("checks", ["off", Checks(edited="allow", divergence="ignore")])
def test_an_edit_is_allowed_where_the_check_is_off(checks: Any) -> None:
    assert _told(2, (0, 1), checks) == {name: [[], []] for name in FAULTS}


@pytest.mark.cpu("a device finds edits with edited='raise' alone")
@on_ranks(2, [[0, 0], [1, 1]])
def test_a_rank_without_the_check_leaves_the_others_in_step(rank: int) -> list[int]:
    return [len(Loop(rank, "info" if rank else own).run(clip_norm)) for own in ("off", Checks(edited="allow"))]


@on_ranks(2)
def _function_form(rank: int) -> Told:
    return Loop(rank, is_function=True).run(clip_norm)


@pytest.mark.cpu("a device finds edits with edited='raise' alone")
def test_the_function_form_tells_as_well() -> None:
    first, second = _function_form()

    assert first == second
    assert "clipped by norm" in first[0][1]
    assert " see LEGACY_DDP_CHECKS=edited=..." in " ".join(first[0][1].split())


@on_ranks(2)
def _raises_and_goes_on(rank: int) -> list[int]:
    """After the error the loop clips after the call."""
    loop, calls = Loop(rank, Checks(edited="raise")), list[int]()
    for call in range(1, STEPS + 1):
        loop.backward()
        if not calls:
            clip_norm(loop)
        before = [grad.clone() for grad in loop.grads]
        try:
            loop.model.all_reduce()
        except LegacyDDPError:
            assert all(map(torch.equal, before, loop.grads))
            calls.append(call)
            loop.model.all_reduce()
        loop.step()
    assert logged_warnings.take() == []
    return calls


def test_the_error_leaves_the_gradients_and_training_goes_on() -> None:
    first, second = _raises_and_goes_on()

    assert first == second
    assert len(first) == 1


def _compiled(rank: int) -> Told:
    loop = Loop(rank)
    eager = loop.backward

    def backward() -> None:
        with warnings.catch_warnings(), torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            warnings.simplefilter("ignore")  # torch's own, about the tensors that it looks at
            eager()

    loop.backward = backward  # type: ignore[method-assign]
    return loop.run(lambda each: torch._foreach_mul_(each.grads, 0.5))


@pytest.mark.thorough
@pytest.mark.parametrize("transport", ["host"], indirect=True)
def test_a_compiled_backward_is_silent(transport: str) -> None:
    assert run_ranks(_compiled, 2, timeout_seconds=120) == [[], []]
