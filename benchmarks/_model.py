"""What do the benchmarks train? A transformer, and one training step of it, wrapped in anything or in nothing."""

from contextlib import nullcontext

import torch
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel, SyncRecord

VOCABULARY, WIDTH, LAYERS, HEADS, SEQUENCE, BATCH = 3328, 256, 10, 4, 32, 2


class Transformer(nn.Module):
    """8.8 million parameters in 123 tensors."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.norm(self.layers(self.embedding(tokens))) @ self.embedding.weight.T


def random_tokens(update_freq: int) -> torch.Tensor:
    """The micro-batches of one step."""
    return torch.randint(VOCABULARY, (update_freq, BATCH, SEQUENCE))


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, set_to_none: bool
) -> SyncRecord | None:
    """One training step, a micro-batch per row of ``tokens``; what our call did, if ``model`` is ours.

    Collective, unless ``model`` is not wrapped.
    """
    optimizer.zero_grad(set_to_none=set_to_none)
    for index, batch in enumerate(tokens):
        is_last = index == len(tokens) - 1
        with model.no_sync() if hasattr(model, "no_sync") and not is_last else nullcontext():
            logits = model(batch)
            nn.functional.cross_entropy(logits.flatten(0, 1), batch.flatten()).backward()
    record = model.all_reduce() if isinstance(model, LegacyDistributedDataParallel) else None
    optimizer.step()
    return record
