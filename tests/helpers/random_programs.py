"""Random training programs, each run with the library on every rank and without it on copies of all ranks' models.

The loss is linear in the parameters, with small integers: gradients, their sums and the means of two ranks are exact in
fp64, so that what the library leaves is compared bit by bit. All ranks draw the same program from its seed.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from tests.helpers import logged_warnings
from tests.helpers.small_sizes import move_gradients_from
from tests.helpers.threads import run_together

SHAPES = ((3, 2), (3, 2), (2, 4), (5,))
NAMES = tuple(f"p{index}" for index in range(len(SHAPES)))
MAX_STEPS = 4


class Model(nn.Module):
    """Parameters of small integers, some of one shape."""

    def __init__(self) -> None:
        super().__init__()
        for index, shape in enumerate(SHAPES):
            self.register_parameter(f"p{index}", nn.Parameter(torch.full(shape, 1.0 + index, dtype=torch.float64)))

    def forward(self, factors: dict[str, float]) -> torch.Tensor:
        """The sum of all elements of the named parameters, each times its factor and its position."""
        terms = [
            (self.get_parameter(name).flatten() * torch.arange(1.0, 1 + self.get_parameter(name).numel())).sum()
            * factor
            for name, factor in factors.items()
        ]
        return torch.stack(terms).sum()


def _trainable(model: Model) -> list[str]:
    return [name for name in NAMES if model.get_parameter(name).requires_grad]


@dataclass
class Kept:
    """Something of a gradient that the user keeps, and its values when the gradient was cleared."""

    parameter: nn.Parameter
    tensor: torch.Tensor
    values: torch.Tensor | None = None

    def part(self) -> None:
        """The gradient goes its own way from now on; what is kept of it stays as it is."""
        self.values = self.tensor.clone() if self.values is None else self.values

    def is_intact(self) -> bool:
        return self.values is None or torch.equal(self.tensor, self.values)


@dataclass
class Program:
    """One program on one rank. ``models[r]`` is the model of rank r without the library; ``own`` has it."""

    seed: int
    rank: int
    size: int
    kept: list[Kept] = field(default_factory=list)
    is_warned: bool = False

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        move_gradients_from(0 if self.draw.random() < 0.7 else 2**40)
        self.options = {
            "gradient_as_bucket_view": self.draw.random() < 0.7,
            "buffer_size": self.draw.choice([3, 2**28]),
        }
        self.is_weighted = self.draw.random() < 0.4
        self.own, self.models = Model(), [Model() for _ in range(self.size)]
        self.wrapped = LegacyDistributedDataParallel(self.own, **self.options)
        self.optimizer = torch.optim.SGD(self.own.parameters(), lr=1.0)

    def run(self) -> None:
        for _ in range(self.draw.randint(2, MAX_STEPS)):
            for change in self.draw.sample(CHANGES, self.draw.randint(0, 2)):
                change(self)
            self.clear()
            self.backward()
            for edit in self.draw.sample(EDITS, self.draw.randint(0, 1)):
                edit(self)
            self.reduce()
            self.check()
            if self.draw.random() < 0.5:
                self.optimizer.step()
        texts = logged_warnings.take()
        assert len(texts) == (self.is_warned and self.rank == 0), texts
        assert all("uneven work" in text for text in texts)

    def all_models(self) -> list[Model]:
        return [self.own, *self.models]

    def clear(self) -> None:
        set_to_none = self.draw.random() < 0.7
        if set_to_none:
            for kept in self.kept:
                kept.part()
        elif self.kept:  # cleared in place, with all that is kept of it: as without the library
            self.kept = [kept for kept in self.kept if kept.values is not None]
        for model in self.all_models():
            model.zero_grad(set_to_none=set_to_none)

    def backward(self) -> None:
        """As many micro-batches on every rank, of factors of its own; in a part of the programs by two threads."""
        used = [name for name in _trainable(self.own) if self.draw.random() < 0.8]
        self.counts = [self.draw.randint(1, 3)] * self.size
        if self.draw.random() < 0.1:
            self.counts[0] += 1  # uneven work, of which a plain mean is warned: once, and logged as warnings are errors
        by_threads, fails = self.draw.random() < 0.3, self.draw.random() < 0.2
        factors = [
            [{name: float(self.draw.randint(-3, 3)) for name in used} for _ in range(count)] for count in self.counts
        ]
        if not used:
            self.counts = [0] * self.size
            return
        for model, batches in zip(self.models, factors, strict=True):
            for batch in batches:
                model(batch).backward()
        mine = [self.wrapped(batch) for batch in factors[self.rank]]
        if by_threads:
            run_together([loss.backward for loss in mine])
        else:
            self._accumulate(mine, fails=fails)

    def _accumulate(self, losses: list[torch.Tensor], *, fails: bool) -> None:
        try:
            with self.wrapped.no_sync():
                for loss in losses[:-1]:
                    loss.backward()
                if fails:
                    raise KeyError("of the user's own")
        except KeyError:
            pass
        losses[-1].backward()

    def reduce(self) -> None:
        skips = [self.draw.random() < 0.15 for _ in range(self.size)]
        sizes = [self.draw.randint(0, 3) for _ in range(self.size)] if self.is_weighted else [1] * self.size
        weights = [0 if skip else size for skip, size in zip(skips, sizes, strict=True)]
        sample_size = sizes[self.rank] if self.is_weighted else None
        record = self.wrapped.all_reduce(sample_size, skip=skips[self.rank])
        assert record.divisor == sum(weights)
        counts = {count for count, weight in zip(self.counts, weights, strict=True) if weight}
        self.is_warned = self.is_warned or (len(counts) > 1 and not self.is_weighted)
        self.expected = {name: self._mean(name, weights) for name in _trainable(self.own)}
        for name, grad in self.expected.items():
            for model in self.models:
                model.get_parameter(name).grad = None if grad is None else grad.clone()

    def _mean(self, name: str, weights: list[int]) -> torch.Tensor | None:
        grads = [model.get_parameter(name).grad for model, weight in zip(self.models, weights, strict=True) if weight]
        present = [grad for grad in grads if grad is not None]
        return torch.stack(present).sum(0) / sum(weights) if present else None

    def check(self) -> None:
        for name, expected in self.expected.items():
            grad = self.own.get_parameter(name).grad
            assert (grad is None) == (expected is None), name
            assert grad is None or expected is None or torch.equal(grad, expected), (name, grad, expected)
        assert all(kept.is_intact() for kept in self.kept)

    # What a program may do between two steps.

    def freeze(self) -> None:
        name = self.draw.choice(NAMES)
        for model in self.all_models():
            parameter = model.get_parameter(name)
            self._part(parameter)
            parameter.grad = None
            parameter.requires_grad_(not parameter.requires_grad)

    def swap(self) -> None:
        parameter = self.own.get_parameter(self.draw.choice(NAMES))
        self._part(parameter)
        parameter.grad = None  # of the others, too, before the next backward
        self._drop(parameter)
        other = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, other)

    def alias(self) -> None:
        tie = self.draw.random() < 0.6
        for model in self.all_models():
            first = model.get_parameter("p0")
            model.p1 = first if tie else nn.Parameter(first.detach().clone(), requires_grad=first.requires_grad)
        self.optimizer = torch.optim.SGD(self.own.parameters(), lr=1.0)

    def keep(self) -> None:
        parameter = self.own.get_parameter(self.draw.choice(NAMES))
        grad = parameter.grad
        how: Callable[[torch.Tensor], torch.Tensor] = self.draw.choice(
            [lambda g: g, torch.Tensor.detach, lambda g: g[0], lambda g: torch.from_numpy(g.detach().numpy())]
        )
        if grad is not None:
            self.kept.append(Kept(parameter, how(grad)))

    def replace_memory(self) -> None:
        parameter = self.own.get_parameter(self.draw.choice(NAMES))
        grad = parameter.grad
        if grad is not None:
            self._part(parameter, but=grad)
            grad.data = grad.data.clone()

    def forget(self) -> None:
        self.kept = self.kept[:-1]

    def reduce_again(self) -> None:
        """A second wrapper on the same parameters: the mean of equal values, exact for two ranks."""
        if not self.is_weighted:
            LegacyDistributedDataParallel(self.own, init_sync=False, checks="off").all_reduce()

    # What a program may do between backward and the call.

    def scale(self) -> None:
        name = self.draw.choice(NAMES)
        for model in self.all_models():
            if (grad := model.get_parameter(name).grad) is not None:
                grad.mul_(2.0)

    def assign(self) -> None:
        name = self.draw.choice(_trainable(self.own) or [NAMES[0]])
        for model in self.all_models():
            if model.get_parameter(name).requires_grad:
                self._part(model.get_parameter(name))
                model.get_parameter(name).grad = torch.full_like(model.get_parameter(name), 3.0)

    def _part(self, parameter: nn.Parameter, but: torch.Tensor | None = None) -> None:
        """The gradient of ``parameter`` is about to be another tensor, or to get other memory as the object ``but``."""
        for kept in self.kept:
            if kept.parameter is parameter and kept.tensor is not but:
                kept.part()

    def _drop(self, parameter: nn.Parameter) -> None:
        names = [name for name in NAMES if self.own.get_parameter(name) is parameter]
        for model in self.models:
            for name in names:
                model.get_parameter(name).grad = None


CHANGES = [
    Program.freeze,
    Program.swap,
    Program.alias,
    Program.keep,
    Program.keep,
    Program.replace_memory,
    Program.forget,
    Program.reduce_again,
]
EDITS = [Program.scale, Program.assign]


def run_programs(rank: int, size: int, count: int) -> int:
    """Run programs 0 to ``count`` - 1; how many were run."""
    torch.set_num_threads(1)
    for seed in range(count):
        try:
            Program(seed, rank, size).run()
        except Exception as error:
            error.add_note(f"in program {seed}")
            raise
    return count
