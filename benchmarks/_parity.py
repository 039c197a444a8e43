"""Check before the timing that all variants do the same work, so that no variant wins by omission."""

import gc
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from _ways import LOCAL, REFERENCE, WAYS, Way, begin, own_batches
from _workloads import Workload
from torch import nn

STEPS = 3  # the first ones are special: DDP orders its buckets anew, views are made
RATE = 1e6  # what is left of the weights after such a step is the gradient
TOLERANCE = 1e-4  # of the greatest element of a tensor; sums over the ranks in another order differ by 1e-7


def check_training(ways: Mapping[str, Way], workload: Workload, update_freq: int, *, set_to_none: bool) -> None:
    """Collective: exit if a synchronising variant ends in weights different from torch DDP.

    All variants begin with equal weights, on different data per rank. Training without synchronisation has to differ in
    every tensor; otherwise the check would prove nothing. Holds two sets of weights and one model at a time.
    """
    expected = _weights_after(WAYS[REFERENCE], workload, update_freq, set_to_none=set_to_none)
    problem = ""
    for name, way in {LOCAL: WAYS[LOCAL], **ways}.items():
        if way.synchronizes or name == LOCAL:
            weights = _weights_after(way, workload, update_freq, set_to_none=set_to_none)
            problem = problem or find_problem(name, weights, expected, unsynchronized=name == LOCAL)
    exit_together(problem)


def check_mean(name: str, model: nn.Module, fill: Callable[[], object], call: Callable[[], object]) -> None:
    """Collective: exit unless ``call`` leaves the mean over the ranks of the gradients made by ``fill``, twice."""
    problem = ""
    for _ in range(2):
        fill()
        local = [parameter.grad.clone() for parameter in model.parameters()]
        expected = [grad.clone() for grad in local]
        for grad in expected:
            dist.all_reduce(grad)
            grad.div_(dist.get_world_size())
        call()
        grads = [parameter.grad for parameter in model.parameters()]
        problem = problem or find_problem(f"before {name}", local, expected, unsynchronized=True)
        problem = problem or find_problem(name, grads, expected, unsynchronized=False)
    exit_together(problem)


def find_problem(
    name: str, tensors: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], *, unsynchronized: bool
) -> str:
    """Description of a problem, or empty. Every tensor has to be as expected; with ``unsynchronized``, no tensor."""
    same = [_is_close(own, other) for own, other in zip(tensors, expected, strict=True)]
    if unsynchronized and any(same):
        return f"{name}: {sum(same)} of {len(same)} tensors are as if synchronised; the data does not tell ways apart"
    if not unsynchronized and not all(same):
        return f"{name}: got other values than expected in {same.count(False)} of {len(same)} tensors; not timed"
    return ""


def _is_close(own: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((own - other).abs().max() <= TOLERANCE * other.abs().max())  # not if either is not a number


def exit_together(problem: str) -> None:
    """Collective: exit on every rank if any rank has a problem, with the first problem as text."""
    problems = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    if any(problems):
        sys.exit(next(filter(None, problems)))


def _weights_after(way: Way, workload: Workload, update_freq: int, *, set_to_none: bool) -> list[torch.Tensor]:
    training = begin(way, workload, set_to_none=set_to_none, rate=0.0)
    for number in range(STEPS):
        if number == STEPS - 1:
            training.optimizer.param_groups[0]["lr"] = RATE
        training.step(own_batches(workload, update_freq, number=number))
    weights = training.weights
    training.optimizer.zero_grad()
    del training
    gc.collect()  # a hook may refer back to its wrapper
    return weights
