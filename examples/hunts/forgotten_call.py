"""A rank that steps alone. torchrun --nproc-per-node 3 examples/hunts/forgotten_call.py"""

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel


def main() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    model = LegacyDistributedDataParallel(module)  # the hunt: it looks before every step()
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + dist.get_rank())
    for step in range(1, 11):
        optimizer.zero_grad()
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        if step != 6 or dist.get_rank() != 1:  # the fault: a branch that one rank takes, without the call
            model.all_reduce()
        optimizer.step()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    try:
        main()
    except LegacyDDPError as error:
        if rank < 2:
            print(f"--- rank {rank}: {type(error).__name__}: {error}\n", flush=True)
    finally:
        dist.destroy_process_group()
