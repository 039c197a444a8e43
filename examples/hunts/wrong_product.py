"""A run with a wrong product in step 7. torchrun --nproc-per-node 2 examples/hunts/wrong_product.py FOLDER [--fault]"""

import argparse
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import LegacyDistributedDataParallel
from legacy_ddp.debug import Recorder


class Fault:
    is_due = False


@torch.library.custom_op("demo::product", mutates_args=())
def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A kernel as from an extension: torch sees its inputs and outputs, and not its inside."""
    out = x @ weight
    if Fault.is_due:  # the fault: one bit of one element, once
        Fault.is_due = False
        out.view(-1).view(torch.int32)[5] ^= 1 << 20
    return out


def keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ARG001 - torch passes by name
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = ctx.saved_tensors
    return product(gradient, weight.t()), product(x.t(), gradient)


product.register_autograd(backward, setup_context=keep_inputs)


class Product(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight)


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.product, self.dropout = nn.LayerNorm(size), Product(size), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.relu(self.product(self.norm(x))))


def main(folder: str, has_fault: bool, operations: Collection[int]) -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(32) for _ in range(4)))
    model = LegacyDistributedDataParallel(nn.Sequential(nn.Linear(16, 32), blocks, nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + dist.get_rank())
    with Recorder(model, folder, optimizer=optimizer, operations=operations):
        for step in range(1, 11):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16)).square().mean()
            Fault.is_due = has_fault and step == 7 and dist.get_rank() == 1
            loss.backward()
            model.all_reduce(metrics={"loss": loss.detach()})
            optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", help="of the trace")
    parser.add_argument("--fault", action="store_true", help="a wrong bit on rank 1 in step 7")
    parser.add_argument("--operations", type=int, metavar="STEP", help="record the operations of this step")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        step = given.operations
        main(given.folder, given.fault, () if step is None else range(step, step + 1))
    finally:
        dist.destroy_process_group()
