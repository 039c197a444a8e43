"""A job of Lightning on legacy_ddp, with two changed lines: the import, and the name of the strategy.

python examples/lightning_digits.py --strategy legacy_ddp
"""

import argparse
import sys

try:
    import lightning.pytorch as pl
    import torch
    from sklearn.datasets import load_digits
except ModuleNotFoundError as error:
    sys.exit(f"{error.name} is not installed; run: pip install 'legacy_ddp[demo,lightning]'")
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import legacy_ddp.lightning  # noqa: F401 - registers the strategy

HELD_OUT = 360
BATCH_SIZE = 32  # images per rank


class Digits(pl.LightningModule):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 10),
        )

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def validation_step(self, batch: list[torch.Tensor]) -> None:
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on the handwritten digits of scikit-learn, with Lightning.")
    parser.add_argument("--strategy", default="legacy_ddp", help="any of Lightning's (default: legacy_ddp)")
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="ranks on this host (default: 2)")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training images (default: 8)")
    args = parser.parse_args()

    pl.seed_everything(0)
    train_set, test_set = load_data()
    trainer = pl.Trainer(
        strategy=args.strategy,
        accelerator="cpu",
        devices=args.devices,
        max_epochs=args.epochs,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Digits(), DataLoader(train_set, BATCH_SIZE, shuffle=True), DataLoader(test_set, BATCH_SIZE))
    if trainer.is_global_zero:
        print(f"accuracy {float(trainer.callback_metrics['accuracy']):.4f}", flush=True)


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Images of shape (n, 1, 8, 8) with values from 0 to 1, and their labels: training set and held-out set."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).float()[:, None] / 16
    labels = torch.from_numpy(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return TensorDataset(images[HELD_OUT:], labels[HELD_OUT:]), TensorDataset(images[:HELD_OUT], labels[:HELD_OUT])


if __name__ == "__main__":
    main()
