"""Steps without a call that no optimizer with the parameters makes: by hand, or of an optimizer of copies."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from legacy_ddp import Checks, all_reduce_gradients
from tests.call.test_untrained import Job
from tests.helpers import logged_warnings
from tests.helpers.shared_jobs import run_cases

STEPS = 24  # a warning comes after 18 forward passes
Step = Callable[[], None]


def _by_hand(job: Job) -> Step:
    def step() -> None:
        with torch.no_grad():
            for parameter in job.net.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad

    return step


def _of_copies(job: Job, *, by_data: bool) -> Step:
    copies = [parameter.detach().double().requires_grad_() for parameter in job.net.parameters()]
    optimizer = torch.optim.Adam(copies, lr=0.01)

    def step() -> None:
        for each, parameter in zip(copies, job.net.parameters(), strict=True):
            each.grad = None if parameter.grad is None else parameter.grad.double()
        optimizer.step()
        with torch.no_grad():
            for each, parameter in zip(copies, job.net.parameters(), strict=True):
                (parameter.data if by_data else parameter).copy_(each)

    return step


STEPPERS: dict[str, Callable[[Job], Step]] = {
    "by hand": _by_hand,
    "copies": partial(_of_copies, by_data=False),
    "copies, through .data": partial(_of_copies, by_data=True),
}


def _steps(job: Job, step: Step, *, micro_batches: int = 1) -> Iterator[None]:
    """Before each step, where a call belongs."""
    for _ in range(STEPS):
        job.net.zero_grad()
        for _ in range(micro_batches - 1):
            with job.model.no_sync():
                job.backward()
        job.backward()
        yield
        step()


def _trains(job: Job, step: Step, *, calls: int, micro_batches: int = 1) -> None:
    """Calls in the first steps, and forgets them later."""
    for number, _ in enumerate(_steps(job, step, micro_batches=micro_batches)):
        if number < calls:
            job.call()


# Healthy twins


def _calls_the_function(job: Job, step: Step) -> None:
    """The wrapper serves forward passes alone."""
    for _ in _steps(job, step):
        all_reduce_gradients(job.net)


def _local(job: Job, step: Step) -> None:
    """Reptile: local steps, with the forward pass outside of the block."""
    for _ in range(STEPS):
        job.net.zero_grad()
        loss = job.forward(torch.randn(6, 4)).square().mean()
        with job.model.no_sync():
            loss.backward()
            step()


def _accumulates(job: Job, step: Step) -> None:
    """Many micro-batches without no_sync(), and a layer that decays by hand."""
    for number, _ in enumerate(_steps(job, lambda: job.net[0].weight.data.mul_(0.99))):
        if number == STEPS - 1:
            job.call()
            step()


def _perturbs(job: Job, step: Step) -> None:
    """SAM: a second backward pass at weights that are written to, and restored."""
    for _ in _steps(job, step):
        before = [parameter.detach().clone() for parameter in job.net.parameters()]
        for parameter in job.net.parameters():
            parameter.data += parameter.grad
        job.backward()
        for parameter, values in zip(job.net.parameters(), before, strict=True):
            parameter.data.copy_(values)
        job.call()


def _evaluates(job: Job, step: Step) -> None:
    """Forward passes with gradients and without backward, while other weights are in their place."""
    job.backward()
    job.call()
    step()
    for _ in range(STEPS):
        for parameter in job.net.parameters():
            parameter.data.mul_(0.99)
        job.forward(torch.randn(6, 4))


_Loop = Callable[..., None]
_FORGETS = partial(_trains, calls=0)
LOUD: dict[str, tuple[_Loop, dict[str, Any]]] = {
    "forgets": (_FORGETS, {}),
    "forgets later": (partial(_trains, calls=4), {}),
    "accumulates and forgets": (partial(_FORGETS, micro_batches=3), {}),
    "without views": (_FORGETS, {"gradient_as_bucket_view": False}),
    "detail": (_FORGETS, {"checks": "detail"}),
    "reproducible": (partial(_FORGETS, micro_batches=2), {"reproducible": True}),
}
SILENT: dict[str, tuple[_Loop, dict[str, Any]]] = {
    "off": (_FORGETS, {"checks": "off"}),
    "allowed": (_FORGETS, {"checks": Checks(unsynchronized_step="allow")}),
    "calls": (partial(_trains, calls=STEPS), {}),
    "accumulates and calls": (partial(_trains, calls=STEPS, micro_batches=3), {}),
    "function": (_calls_the_function, {}),
    "local": (_local, {}),
    "accumulates": (_accumulates, {}),
    "perturbs": (_perturbs, {}),
    "evaluates": (_evaluates, {}),
}


def _said(rank: int, of: str) -> dict[tuple[str, str], list[str]]:
    said = {}
    for name, (loop, options) in (LOUD if of == "loud" else SILENT).items():
        for how, make_step in STEPPERS.items():
            job = Job(rank, **options)
            loop(job, make_step(job))
            said[name, how] = logged_warnings.take()
    return said


def test_a_forgotten_call_is_told_whoever_holds_the_weights() -> None:
    found = run_cases(_said, 2, {"loud": ("loud",), "silent": ("silent",)})

    for said in found["loud"]:  # by rank
        for case, texts in said.items():
            assert [text.partition(",")[0] for text in texts] == [
                "the weights of the wrapped Sequential have changed 10 times between forward passes"
            ], (case, texts)
    for said in found["silent"]:
        assert {case: texts for case, texts in said.items() if texts} == {}
