"""What do the tests of Lightning train, and how? Small modules, each with one thing that may go another way."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from legacy_ddp import Checks
from tests.helpers.lightning_scenarios import QUIET, RANKS, Result

FEATURES = 6
CLASSES = 3
BATCH_SIZE = 4
TRAINER = {"accelerator": "cpu", "devices": RANKS, **QUIET}
# What the wrapper takes by keyword but for ``ignore``, each other than its default.
ARGUMENTS: dict[str, Any] = {
    "buffer_size": 7,
    "init_sync": False,
    "gradient_as_bucket_view": False,
    "reduce_dtype": torch.bfloat16,
    "checks": Checks(nonfinite="raise"),
    "timeout_seconds": 90.0,
}


def make_data(batches: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """That many batches for each rank, once Lightning has split them."""
    generator = torch.Generator().manual_seed(1)
    items = batches * RANKS * BATCH_SIZE
    inputs = torch.randn(items, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (items,), generator=generator)
    return DataLoader(TensorDataset(inputs, labels), batch_size=BATCH_SIZE)


def fit(strategy: Any, module: pl.LightningModule, *, batches: int = 6, **options: Any) -> pl.Trainer:
    trainer = pl.Trainer(**{"strategy": strategy, "max_epochs": 1, **TRAINER, **options})
    trainer.fit(module, make_data(batches))
    return trainer


def draw(module: nn.Module, rank: int) -> float:
    """Give it weights of this rank's own; their sum."""
    torch.manual_seed(rank + 1)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return total(module)


def total(module: nn.Module) -> float:
    return sum(float(parameter.sum()) for parameter in module.parameters())


def state(module: pl.LightningModule) -> Result:
    return {key: value.clone() for key, value in module.state_dict().items()}


class Plain(pl.LightningModule):
    """A perceptron that keeps the greatest gradient of every backward, as ``on_after_backward`` sees it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = self.make_net()
        self.seen: list[float] = []

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)

    def training_step(self, batch: Any) -> torch.Tensor:
        inputs, labels = batch
        return cross_entropy(self(inputs), labels)

    def evaluate(self, batch: Any, name: str) -> None:
        inputs, labels = batch
        self.log(name, cross_entropy(self(inputs), labels), sync_dist=True)

    def validation_step(self, batch: Any) -> None:
        self.evaluate(batch, "validated")

    def test_step(self, batch: Any) -> None:
        self.evaluate(batch, "tested")

    def predict_step(self, batch: Any) -> torch.Tensor:
        return self(batch[0])

    def on_after_backward(self) -> None:
        self.seen.append(max(float(p.grad.abs().max()) for p in self.parameters() if p.grad is not None))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)


class Normed(Plain):
    """With BatchNorm, whose statistics are each rank's own."""

    def make_net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, CLASSES))


class Sparing(Plain):
    """With a layer that no loss reaches, and weight decay that would move it."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)


class Sharded(Plain):
    """The state of its optimizer is split over the ranks."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.AdamW, lr=0.05)


class Overflowing(Plain):
    """On rank 1 the loss of batch 3 is multiplied; in fp16 its gradients overflow."""

    def __init__(self, factor: float = 1e38) -> None:
        super().__init__()
        self.factor = factor

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch)
        return loss * self.factor if (self.global_rank, batch_idx) == (1, 3) else loss


class Adversaries(pl.LightningModule):
    """A generator and a discriminator, optimised by hand, with a clip of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, FEATURES))
        self.discriminator = nn.Sequential(nn.Linear(FEATURES, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Any) -> None:
        real, _ = batch
        for optimizer, is_generators in zip(self.optimizers(), (False, True), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            fake = self.generator(real[:, :2])
            verdict = self.discriminator(fake if is_generators else torch.cat([fake.detach(), real]))
            wanted = torch.full_like(verdict, float(is_generators))
            wanted[len(fake) :] = 1.0
            self.manual_backward(mse_loss(verdict, wanted))
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (self.discriminator, self.generator)]
