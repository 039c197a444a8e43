"""Data and random numbers that depend on the micro-batches of a step, and not on their split over ranks."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import Sampler

from legacy_ddp._errors import argument_errors
from legacy_ddp._memory.layout import fingerprint
from legacy_ddp._ranks.tree_reduce import aligned_splits, format_splits, is_aligned
from legacy_ddp._torch import device as devices

__all__ = ["GlobalBatchSampler", "aligned_splits", "micro_batch_rng"]


class GlobalBatchSampler(Sampler[list[int]]):
    """Batches of indices for ``DataLoader(dataset, batch_sampler=...)``: one item is one micro-batch of this rank.

    An optimizer step takes ``micro_batches_per_step`` micro-batches of ``micro_batch_size`` samples each. The samples
    and their order depend only on ``seed`` and the epoch. Of the M micro-batches of a step, rank r of W takes numbers
    r M/W to (r + 1) M/W - 1. If fewer samples than a step needs are left at the end of an epoch, they are not used.

    An iteration starts at the position and ends with the epoch; the next iteration begins the next epoch. The position
    moves as indices are read, and worker processes of a DataLoader read ahead. After an unfinished iteration set it to
    the position of the training, with ``load_state_dict(state_dict(global_step=...))``.

    Args:
        dataset_length: number of samples.
        micro_batch_size: samples in a micro-batch.
        micro_batches_per_step: micro-batches of all ranks together.
        seed: of the order.
        shuffle: a new order for every epoch; otherwise samples come in the order of their numbers.
        rank, world_size: default: of the default process group, or of a single process without a group.

    Raises:
        TypeError, ValueError: an unusable value, or a split of the micro-batches over ranks that
            ``reproducible=True`` cannot add in one order; the text lists the possible splits.

    Example:
        >>> sampler = GlobalBatchSampler(8, 1, micro_batches_per_step=4, shuffle=False, rank=1, world_size=2)
        >>> list(sampler)  # the second half of each step
        [[2], [3], [6], [7]]
    """

    @argument_errors
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
        self._step = 0  # in the epoch: the first step not handed out completely
        self._moves = 0  # of the position, without those of the running iteration

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch."""
        return self._length // self._step_size

    @property
    def micro_batches(self) -> range:
        """The numbers of this rank's micro-batches in a step, each the ``index`` of :func:`micro_batch_rng`."""
        return range(self.rank * self._each, (self.rank + 1) * self._each)

    @property
    def epoch(self) -> int:
        """The epoch of the position, from 0."""
        return self._epoch

    def __len__(self) -> int:
        """Micro-batches of this rank in a whole epoch."""
        return self.steps_per_epoch * self._each

    def __iter__(self) -> Iterator[list[int]]:
        """The micro-batches of this rank from the position to the end of the epoch.

        Raises:
            RuntimeError: another iteration began, or the position was moved.
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
                        "this iteration is out of date: got a newer iteration, set_epoch() or load_state_dict() "
                        "meanwhile; start a new iteration"
                    )
                if number == self.micro_batches[-1]:
                    self._step += 1  # before the yield: this step is handed out completely
                start = first + number * self._size
                yield order[start : start + self._size].tolist()

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of ``epoch``. In the middle of ``epoch`` the position does not change, for a resumed loop.

        Raises:
            TypeError, ValueError: ``epoch`` is no int of at least 0.
        """
        _check_int("epoch", epoch, 0)
        if epoch != self._epoch or self._step == self.steps_per_epoch:
            self._epoch, self._step = epoch, 0
            self._moves += 1

    def state_dict(self, *, global_step: int | None = None) -> dict[str, Any]:
        """The position, and the arguments that determine the content.

        ``global_step``: optimizer steps since the start of epoch 0; needed if worker processes of the DataLoader read
        ahead. Default: the steps of which all indices were read.

        Raises:
            TypeError, ValueError: ``global_step`` is no int of at least 0.
        """
        if global_step is None:
            global_step = self._epoch * self.steps_per_epoch + self._step
        _check_int("global_step", global_step, 0)
        return {**self._content, "global_step": global_step}

    @argument_errors
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position in ``state``, from :meth:`state_dict`. The world size may have changed.

        Raises:
            ValueError: the state belongs to other data, sizes or another seed, or is no state.
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
    """Random numbers inside the block, for instance dropout masks, depend only on the three arguments.

    ``step``: number of the optimizer step, from 0. ``index``: number of the micro-batch in the step of all ranks, as in
    :attr:`GlobalBatchSampler.micro_batches`. ``seed``: of the training. The block seeds torch's generators of the CPU
    and of the current device and restores them at its end; NumPy's and Python's generators do not change.

    Raises:
        TypeError, ValueError: an argument that is no int of at least 0.

    Example:
        >>> with micro_batch_rng(step=0, index=2):
        ...     mask = torch.rand(3)
        >>> with micro_batch_rng(step=0, index=2):
        ...     torch.equal(mask, torch.rand(3))
        True
    """
    for name, value in (("step", step), ("index", index), ("seed", seed)):
        _check_int(name, value, 0)
    block_seed, device = _seed("micro-batch", seed, step, index), devices.accelerator()
    before = None if device is None else devices.generator_state(device)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(block_seed)
        if device is not None:
            devices.seed_generator(device, block_seed)
        try:
            yield
        finally:
            if device is not None and before is not None:
                devices.set_generator_state(device, before)


def _seed(*parts: object) -> int:
    # Torch's generator for the CPU uses 32 bits of a seed, so two of many seeds may be equal.
    return fingerprint(repr(parts).encode()) % 2**63


@argument_errors
def _check_int(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} is of the wrong type: got {value!r}, expected an int")
    if value < least:
        raise ValueError(f"{name} is out of range: got {value}, expected at least {least}")
