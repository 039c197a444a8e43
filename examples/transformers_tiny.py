"""The Trainer of transformers with all_reduce(): a tiny BERT from a config, without a download.

torchrun --standalone --nproc-per-node 2 examples/transformers_tiny.py
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from legacy_ddp import LegacyDistributedDataParallel

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported
try:
    from transformers import BertConfig, BertLMHeadModel, Trainer, TrainingArguments
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed; run: pip install "legacy_ddp[transformers]"') from error

SEQUENCES, LENGTH, WORDS = 256, 12, 40


class LegacyDDPTrainer(Trainer):
    """A Trainer with communication in all_reduce() only. ``_wrap_model`` is a private method of transformers."""

    def _wrap_model(
        self,
        model: nn.Module,
        training: bool = True,
        dataloader: Any = None,  # noqa: ARG002 - the signature is the Trainer's
    ) -> nn.Module:
        if not training or isinstance(model, LegacyDistributedDataParallel):  # evaluation, or a second train()
            return model
        return LegacyDistributedDataParallel(self.accelerator.prepare_model(model, evaluation_mode=True))

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(model, *args, **kwargs)  # forward and backward of one micro-batch
        model.all_reduce()  # does nothing inside no_sync(), which the Trainer enters for all but the last
        return loss


class Sequences(Dataset):  # type: ignore[type-arg]
    """Words that count up in steps of 1 to 3; the ends, of different lengths, are masked in the labels."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        starts = torch.randint(WORDS, (SEQUENCES, 1), generator=generator)
        steps = torch.randint(1, 4, (SEQUENCES, 1), generator=generator)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (SEQUENCES, 1), generator=generator)
        places = torch.arange(LENGTH)
        self.words = (starts + steps * places) % WORDS
        self.labels = self.words.masked_fill(places >= lengths, -100)

    def __len__(self) -> int:
        return SEQUENCES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny BERT with the Trainer of transformers.")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the sequences (default: 10)")
    parser.add_argument(
        "--update-freq", type=int, default=4, metavar="N", help="micro-batches per step and rank (default: 4)"
    )
    parser.add_argument("--save", type=Path, metavar="DIR", help="where the trained models go (default: nowhere)")
    parser.add_argument(
        "--ddp", choices=["legacy", "torch"], nargs="+", default=["legacy"], help="what to train with, in turn"
    )
    args = parser.parse_args()

    for ddp in args.ddp:
        with tempfile.TemporaryDirectory() as scratch:
            trainer = make_trainer(scratch, args.epochs, args.update_freq, torch_ddp=ddp == "torch")
            trainer.train()
            trainer.evaluate()
        if args.save:
            trainer.save_model(str(args.save / ddp))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def make_trainer(scratch: str, epochs: int, update_freq: int, *, torch_ddp: bool) -> Trainer:
    """A Trainer from a fixed seed."""
    settings = TrainingArguments(
        output_dir=scratch,
        use_cpu=not torch.cuda.is_available(),  # without it the Trainer deals the same data to all ranks on CPU
        num_train_epochs=epochs,
        gradient_accumulation_steps=update_freq,
        per_device_train_batch_size=8,
        learning_rate=3e-3,
        max_grad_norm=0.5,
        dataloader_pin_memory=torch.cuda.is_available(),
        save_strategy="no",
        logging_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
    )
    kind = Trainer if torch_ddp else LegacyDDPTrainer
    return kind(model=make_model(), args=settings, train_dataset=Sequences(), eval_dataset=Sequences())


def make_model() -> nn.Module:
    """A model with equal weights at every call."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        is_decoder=True,
        loss_type="ForCausalLM",
    )
    return BertLMHeadModel(config)


if __name__ == "__main__":
    main()
