"""A training loop for accelerate with all_reduce(): handwritten digits; accelerate is not patched.

torchrun --standalone --nproc-per-node 2 examples/accelerate_digits.py
"""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from train_digits import Digits, load_digits, make_model

from legacy_ddp import LegacyDistributedDataParallel

try:
    from accelerate import Accelerator
except ModuleNotFoundError as error:
    raise SystemExit(f'{error.name} is not installed; run: pip install "legacy_ddp[accelerate,demo]"') from error

BATCH_SIZE = 16  # images in a micro-batch, on one rank
LEARNING_RATE = 3e-3
MAX_NORM = 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on the handwritten digits of scikit-learn, with accelerate.")
    parser.add_argument("--epochs", type=int, default=3, help="passes over the training images (default: 3)")
    parser.add_argument(
        "--update-freq", type=int, default=4, metavar="N", help="micro-batches per step and rank (default: 4)"
    )
    parser.add_argument("--mixed-precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--save", type=Path, metavar="DIR", help="where accelerate's checkpoints go (default: nowhere)")
    parser.add_argument(
        "--ddp", choices=["legacy", "torch"], nargs="+", default=["legacy"], help="what to train with, in turn"
    )
    args = parser.parse_args()
    try:
        digits = load_digits()
    except ModuleNotFoundError as error:
        parser.error(f'{error.name} is not installed; run: pip install "legacy_ddp[accelerate,demo]"')

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),  # without it accelerate deals the same data to all ranks on CPU
        gradient_accumulation_steps=args.update_freq,
        mixed_precision=args.mixed_precision,
    )
    for ddp in args.ddp:
        accuracy = learn(accelerator, digits, args.epochs, torch_ddp=ddp == "torch")
        accelerator.print(f"{ddp} ddp: accuracy {accuracy:.4f}")
        if args.save:
            accelerator.save_state(str(args.save / ddp))
        accelerator.free_memory()
    accelerator.end_training()


def learn(accelerator: Accelerator, digits: tuple[Digits, Digits], epochs: int, *, torch_ddp: bool) -> float:
    """Collective: train from a fixed seed; returns the share of correctly classified held-out digits."""
    train_set, (images, labels) = digits
    model = wrap(accelerator, make_model(train_set), torch_ddp=torch_ddp)  # seeds torch's random numbers
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    dataset = torch.utils.data.TensorDataset(*train_set)
    loader = torch.utils.data.DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True)
    optimizer, loader = accelerator.prepare(optimizer, loader)
    for _ in range(epochs):
        train(accelerator, model, optimizer, loader)
    with torch.inference_mode():
        found = model(images.to(accelerator.device)).argmax(1).cpu()
    return (found == labels).double().mean().item()


def wrap(accelerator: Accelerator, module: nn.Module, *, torch_ddp: bool) -> nn.Module:
    """Collective: the module on its device, in accelerate's precision, in the wrapper of legacy_ddp or torch DDP."""
    if torch_ddp:
        return accelerator.prepare(module)
    # evaluation_mode is what keeps accelerate from wrapping the module in torch DDP; it trains all the same.
    return LegacyDistributedDataParallel(accelerator.prepare_model(module, evaluation_mode=True))


def train(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: torch.utils.data.DataLoader,  # type: ignore[type-arg]  # as accelerate returns it
) -> None:
    """Collective: one epoch."""
    for images, labels in loader:
        with accelerator.accumulate(model):  # enters model.no_sync() for all but the last micro-batch of a step
            accelerator.backward(cross_entropy(model(images), labels))
            if isinstance(model, LegacyDistributedDataParallel):
                model.all_reduce()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
