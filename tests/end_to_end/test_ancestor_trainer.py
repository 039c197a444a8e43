"""The trainer around the ancestor's class, in its order of work: the same bits here as with the ancestor's rule.

The rule: each rank divides its gradients by the number of ranks, zeros in place of a missing one, and the ranks add
them up, but for those of experts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers.shared_jobs import run_cases

WORDS, SIZE, UPDATES = 11, 6, 8
Weights = dict[str, torch.Tensor]


class Ancestor(nn.Module):
    """The rule, restated for tensors of one dtype."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup):
        super().__init__()
        self.module, self.process_group = module, process_group
        self.accumulate_grads = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.accumulate_grads = True
        yield
        self.accumulate_grads = False

    def all_reduce_grads(self) -> None:
        if self.accumulate_grads:
            return
        ranks = dist.get_world_size(self.process_group)
        for parameter in self.module.parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
            if not hasattr(parameter, "expert"):
                grad /= ranks
                dist.all_reduce(grad, group=self.process_group)
            parameter.grad = grad


class Layers(nn.Module):
    """Layers of which a part is left out in each pass, with an expert of each rank and tied ends."""

    def __init__(self, rank: int):
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, SIZE)
        self.layers = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(4))
        self.expert = nn.Linear(SIZE, SIZE)
        for parameter in self.expert.parameters():
            parameter.expert = True
            parameter.data.add_(0.1 * rank)

    def forward(self, inputs: torch.Tensor, kept: list[bool], *, has_expert: bool) -> torch.Tensor:
        hidden = self.words(inputs)
        for layer, is_kept in zip(self.layers, kept, strict=True):
            hidden = hidden + torch.tanh(layer(hidden)) if is_kept else hidden
        hidden = hidden + self.expert(hidden) if has_expert else hidden
        return hidden @ self.words.weight.T


class Trainer:
    """Updates of several micro-batches, with weights in bf16 also on copies in fp32."""

    def __init__(self, rank: int, model: nn.Module, update_freq: int):
        self.rank, self.model, self.update_freq = rank, model, update_freq
        self.weights = list(model.parameters())
        self.has_copies = self.weights[0].dtype is torch.bfloat16
        held = [weight.detach().float().requires_grad_() for weight in self.weights]
        self.held = held if self.has_copies else self.weights
        self.optimizer = torch.optim.Adam(self.held, lr=0.01, betas=(0.9, 0.98), weight_decay=0.1)

    def train(self, first: int, last: int) -> None:
        for update in range(first, last):
            self.model.zero_grad()
            sizes = torch.tensor(float(sum(self.backward(update, index) for index in range(self.update_freq))))
            assert hasattr(self.model, "all_reduce_grads")  # a class without it would not be called, in silence
            self.model.all_reduce_grads()
            if isinstance(self.model, LegacyDistributedDataParallel):
                self.fill_experts()
            dist.all_reduce(sizes)
            self.step(dist.get_world_size() / sizes)

    def backward(self, update: int, index: int) -> int:
        """A micro-batch, of a rank that has run out of data one whose loss is multiplied by zero. Its tokens."""
        is_dummy = self.rank == 1 and update % 3 == 2 and index == self.update_freq - 1
        draw = torch.Generator().manual_seed(1000 * self.rank + 10 * update + index)
        tokens = torch.randint(WORDS, (2, 5 + self.rank), generator=draw)
        # Mostly the ranks leave out the same layers, as they draw from the same seed.
        draw.manual_seed(10 * update + index + (self.rank if update % 4 == 3 else 0))
        kept = (torch.rand(4, generator=draw) > 0.5).tolist()
        is_last = index == self.update_freq - 1
        # Set before the forward pass, as the older trainer did, or around both, as the newer does.
        if update % 2 or is_last:
            self.model.accumulate_grads = not is_last
            loss = self.loss(tokens, kept, has_expert=update % 4 > 0)
            (loss * 0 if is_dummy else loss).backward()
        else:
            with self.model.no_sync():
                self.loss(tokens, kept, has_expert=update % 4 > 0).backward()
        return 0 if is_dummy else tokens[:, 1:].numel()

    def loss(self, tokens: torch.Tensor, kept: list[bool], *, has_expert: bool) -> torch.Tensor:
        scores = self.model(tokens[:, :-1], kept, has_expert=has_expert)
        return cross_entropy(scores.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="sum")

    def fill_experts(self) -> None:
        """``absent_gradients`` leaves out what is ignored."""
        for parameter in self.weights:
            if hasattr(parameter, "expert") and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def step(self, factor: torch.Tensor) -> None:
        for held, weight in zip(self.held, self.weights, strict=True):
            held.grad = weight.grad.float() if self.has_copies else weight.grad
            held.grad.mul_(factor)
        shared = [held for held, weight in zip(self.held, self.weights, strict=True) if not hasattr(weight, "expert")]
        norm = nn.utils.clip_grad_norm_(shared, 0.5)
        norms = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
        dist.all_gather(norms, norm)
        assert len({float(each) for each in norms}) == 1
        self.optimizer.step()
        if self.has_copies:
            for held, weight in zip(self.held, self.weights, strict=True):
                weight.data.copy_(held)


def _wrap(kind: type[nn.Module], rank: int, dtype: torch.dtype) -> nn.Module:
    module, group = Layers(rank).to(dtype), dist.group.WORLD
    for parameter in module.expert.parameters():
        parameter.expert = True  # a conversion keeps the parameter, and what it is marked with
    if kind is Ancestor:
        return Ancestor(module, group)
    experts = [name for name, parameter in module.named_parameters() if hasattr(parameter, "expert")]
    return kind(module, group, ignore=experts, absent_gradients="zeros")


def _train(rank: int, kinds: tuple[type[nn.Module], type[nn.Module]], update_freq: int, dtype: str) -> list[Weights]:
    """The weights in the middle, from where a second run goes on from the checkpoint of the first, and at the end."""
    trainers = [Trainer(rank, _wrap(kind, rank, getattr(torch, dtype)), update_freq) for kind in kinds]
    trainers[0].train(0, UPDATES // 2)
    saved = trainers[0].model.state_dict(), trainers[0].optimizer.state_dict()
    trainers[1].model.load_state_dict(saved[0])
    trainers[1].optimizer.load_state_dict(saved[1])
    if trainers[1].has_copies:
        for held, other in zip(trainers[1].held, trainers[0].held, strict=True):
            held.data.copy_(other)
    trainers[1].train(UPDATES // 2, UPDATES)
    return [{name: value.float().clone() for name, value in each.model.state_dict().items()} for each in trainers]


def _difference(rank: int, update_freq: int, dtype: str) -> list[str]:
    """The tensors that differ in a bit from a run with the ancestor alone, of runs that change the class midway."""
    ours = LegacyDistributedDataParallel
    expected = _train(rank, (Ancestor, Ancestor), update_freq, dtype)
    found = []
    for kinds in ((ours, ours), (Ancestor, ours), (ours, Ancestor)):
        for moment, (is_, should) in enumerate(zip(_train(rank, kinds, update_freq, dtype), expected, strict=True)):
            found += [f"{kinds} {moment} {name}" for name in should if not torch.equal(is_[name], should[name])]
    moved = {name for name in expected[0] if not torch.equal(expected[0][name], expected[1][name])}
    return found + [f"{name} was not trained" for name in expected[0].keys() - moved]


CASES = {f"{freq} {dtype}": (freq, dtype) for freq in (1, 4) for dtype in ("float32", "bfloat16")}


@pytest.mark.usefixtures("transport")
def test_the_ancestor_s_trainer_ends_in_the_same_bits() -> None:
    for case, of_ranks in run_cases(_difference, 2, CASES).items():
        assert of_ranks == [[], []], case
