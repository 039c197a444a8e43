"""Data and randomness that depend on the step's micro-batches alone, never on how ranks share them out."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from legacy_ddp._buckets.inventory import fingerprint
from legacy_ddp._reproducible.splits import aligned_splits, format_splits, is_aligned

__all__ = ["GlobalBatchSampler", "aligned_splits", "micro_batch_rng"]


class GlobalBatchSampler(Sampler[list[int]]):
    """Batches of indices for ``DataLoader(dataset, batch_sampler=...)``: one item is one micro-batch of this rank.

    An optimizer step takes ``micro_batches_per_step`` micro-batches of ``micro_batch_size`` samples each. Which samples
    they are, and in which order, follows from ``seed`` and the epoch alone; of each step's M micro-batches rank r of W
    takes numbers r M/W to (r + 1) M/W - 1. What is left at the end of an epoch, less than a step, is not used in it.

    An iteration goes on where the position is and ends with the epoch; the next one begins the next epoch. Worker
    processes of a DataLoader read ahead, and the position with them: after an iteration that was broken off say where
    the training is, with ``load_state_dict(state_dict(global_step=...))``.

    Args:
        dataset_length: number of samples.
        micro_batch_size: samples in a micro-batch.
        micro_batches_per_step: those of all ranks together.
        seed: of the order.
        shuffle: a new order for every epoch; else samples come as they are numbered.
        rank, world_size: default: of the default process group, or of a single process if there is none.

    Raises:
        TypeError, ValueError: a value that is not usable, also a split of the micro-batches over ranks that
            ``reproducible=True`` cannot add in one order; the text lists those that it can.
    """

    def __init__(
        self,
        dataset_length: int,
        micro_batch_size: int,
        micro_batches_per_step: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        has_group = dist.is_available() and dist.is_initialized()
        self.world_size = (dist.get_world_size() if has_group else 1) if world_size is None else world_size
        self.rank = (dist.get_rank() if has_group else 0) if rank is None else rank
        self._content: dict[str, Any] = {
            "dataset_length": dataset_length,
            "micro_batch_size": micro_batch_size,
            "micro_batches_per_step": micro_batches_per_step,
            "seed": seed,
            "shuffle": shuffle,
        }
        for name, least in (("dataset_length", 1), ("micro_batch_size", 1), ("micro_batches_per_step", 1), ("seed", 0)):
            _check_int(name, self._content[name], least)
        _check_int("world_size", self.world_size, 1)
        _check_int("rank", self.rank, 0)
        if not isinstance(shuffle, bool):
            raise TypeError(f"shuffle is of the wrong type: got {shuffle!r}, expected True or False")
        if self.rank >= self.world_size:
            raise ValueError(f"rank is out of range: got {self.rank}, expected 0 to {self.world_size - 1}")
        self._each, rest = divmod(micro_batches_per_step, self.world_size)
        if rest or not is_aligned(self.world_size, self._each):
            raise ValueError(
                f"micro_batches_per_step does not suit the world size: got {micro_batches_per_step} on "
                f"{self.world_size} ranks; {format_splits(micro_batches_per_step)}"
            )
        self._length = dataset_length
        self._size = micro_batch_size
        self._step_size = micro_batch_size * micro_batches_per_step
        if dataset_length < self._step_size:
            raise ValueError(
                f"dataset_length is less than a step: got {dataset_length} samples, expected at least "
                f"{self._step_size} ({micro_batches_per_step} micro-batches of {micro_batch_size})"
            )
        self._epoch = 0
        self._step = 0  # in the epoch: the first that is not handed out whole
        self._moves = 0  # of the position by anything but the iteration that is under way

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return self._length // self._step_size

    @property
    def micro_batches(self) -> range:
        """The numbers of this rank's micro-batches among those of a step: what :func:`micro_batch_rng` takes."""
        return range(self.rank * self._each, (self.rank + 1) * self._each)

    @property
    def epoch(self) -> int:
        """The epoch that the position is in, from 0."""
        return self._epoch

    def __len__(self) -> int:
        """Micro-batches of this rank in a whole epoch."""
        return self.steps_per_epoch * self._each

    def __iter__(self) -> Iterator[list[int]]:
        """The micro-batches of this rank from the position to the end of the epoch.

        Raises:
            RuntimeError: another iteration began meanwhile, or the position was moved.
        """
        if self._step == self.steps_per_epoch:
            self._epoch, self._step = self._epoch + 1, 0
        self._moves += 1
        own = self._moves
        order = self._order()
        while self._step < self.steps_per_epoch:
            first = self._step * self._step_size
            for number in self.micro_batches:
                if self._moves != own:
                    raise RuntimeError(
                        "this iteration is not the newest one any more: got another that began, set_epoch() or "
                        "load_state_dict() meanwhile; iterate anew"
                    )
                if number == self.micro_batches[-1]:
                    self._step += 1  # now, and not when the next one is asked for: this step is handed out whole
                start = first + number * self._size
                yield order[start : start + self._size].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of that epoch; in the middle of it the position stays, so a resumed loop may say it again."""
        _check_int("epoch", epoch, 0)
        if epoch != self._epoch or self._step == self.steps_per_epoch:
            self._epoch, self._step = epoch, 0
            self._moves += 1

    def state_dict(self, *, global_step: int | None = None) -> dict[str, Any]:
        """The position, and what the content depends on.

        ``global_step``: optimizer steps taken since the start of epoch 0, to be given where worker processes of the
        DataLoader read ahead of the training. Default: those whose micro-batches were all handed out.
        """
        if global_step is None:
            global_step = self._epoch * self.steps_per_epoch + self._step
        _check_int("global_step", global_step, 0)
        return {**self._content, "global_step": global_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position. The world size may be another one than then.

        Raises:
            ValueError: the state is of other data, sizes or another seed, or is no state.
        """
        expected = {*self._content, "global_step"}
        if set(state) != expected:
            raise ValueError(f"state is not usable: got keys {sorted(state)}, expected {sorted(expected)}")
        for name, value in self._content.items():
            if state[name] != value:
                raise ValueError(
                    f"state is of other content: got {name} {state[name]!r}, expected {value!r} as in this sampler; "
                    "construct the sampler as the saved one was"
                )
        _check_int("global_step", state["global_step"], 0)
        self._epoch, self._step = divmod(state["global_step"], self.steps_per_epoch)
        self._moves += 1

    def _order(self) -> torch.Tensor:
        if not self._content["shuffle"]:
            return torch.arange(self._length, device="cpu")
        generator = torch.Generator("cpu").manual_seed(_seed("order", self._content["seed"], self._epoch))
        return torch.randperm(self._length, generator=generator, device="cpu")


@contextmanager
def micro_batch_rng(step: int, index: int, *, seed: int = 0) -> Iterator[None]:
    """Random numbers inside the block, dropout masks for instance, depend on these three numbers alone.

    ``step``: optimizer steps before this one. ``index``: of the micro-batch among those of all ranks in the step, as
    :attr:`GlobalBatchSampler.micro_batches` has it. Torch's generators of the CPU and of the current CUDA device are
    seeded, and afterwards go on as if the block had not been; NumPy's and Python's are left alone.

    Raises:
        TypeError, ValueError: a number that is no int of at least 0.
    """
    for name, value in (("step", step), ("index", index), ("seed", seed)):
        _check_int(name, value, 0)
    has_cuda: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if has_cuda else []):
        word = _seed("micro-batch", seed, step, index)
        torch.default_generator.manual_seed(word)
        if has_cuda:
            torch.cuda.manual_seed(word)
        yield


def _seed(*parts: object) -> int:
    """A number for a generator, of which torch's one for the CPU uses 32 bits: two of many will coincide."""
    return fingerprint(repr(parts).encode()) % 2**63


def _check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is of the wrong type: got {value!r}, expected an int")
    if value < least:
        raise ValueError(f"{name} is out of range: got {value}, expected at least {least}")
