"""train_lm.py with a planted mistake: a rank scales a gradient slightly in a single step. For replay.py."""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
import train_lm
from _batches import MicroBatch

FACTOR = 1.0 + 2.0**-10


@dataclass(frozen=True)
class Mistake:
    rank: int
    step: int
    parameter: str

    def __str__(self) -> str:
        return f"step {self.step}, rank {self.rank}, gradient of {self.parameter!r} times {FACTOR:.4f}"

    @property
    def environment(self) -> dict[str, str]:
        return {f"MISTAKE_{name.upper()}": str(value) for name, value in asdict(self).items()}

    @classmethod
    def planned(cls) -> "Mistake":
        return cls(int(os.environ["MISTAKE_RANK"]), int(os.environ["MISTAKE_STEP"]), os.environ["MISTAKE_PARAMETER"])


class MistakenTraining(train_lm.Training):
    def update(self, micro_batches: Iterable[MicroBatch]) -> float:
        mistake = Mistake.planned()
        if (self.step + 1, dist.get_rank()) != (mistake.step, mistake.rank):
            return super().update(micro_batches)
        parameter: Any = self.model.module.get_parameter(mistake.parameter)
        handle = parameter.register_hook(lambda grad: grad * FACTOR)
        try:
            return super().update(micro_batches)
        finally:
            handle.remove()


if __name__ == "__main__":
    train_lm.Training = MistakenTraining
    train_lm.main()
