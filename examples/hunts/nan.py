"""A NaN in one parameter on one rank. torchrun --nproc-per-node 3 examples/hunts/nan.py"""

import math

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import Checks, LegacyDDPError, LegacyDistributedDataParallel


def main() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    model = LegacyDistributedDataParallel(module, checks=Checks(nonfinite="raise"))  # the hunt
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + dist.get_rank())
    for step in range(1, 11):
        optimizer.zero_grad()
        loss = model(torch.randint(100, (8,))).square().mean()
        loss.backward()
        if step == 6 and dist.get_rank() == 1:
            module[0].weight.grad[7, 3] = math.nan  # the fault: a kernel that divided by zero, say
        model.all_reduce()
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    except LegacyDDPError as error:
        if dist.get_rank() == 0:
            print(error)
    finally:
        dist.destroy_process_group()
