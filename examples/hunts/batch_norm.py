"""Ranks that evaluate differently. torchrun --nproc-per-node 3 examples/hunts/batch_norm.py"""

import torch
import torch.distributed as dist
from torch import nn

from legacy_ddp import LegacyDDPError, LegacyDistributedDataParallel
from legacy_ddp.debug import check_replicas


def main() -> None:
    torch.manual_seed(0)
    model = LegacyDistributedDataParallel(nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 1)))
    optimizer = torch.optim.AdamW(model.parameters())
    # The fault: every rank has data of its own, so BatchNorm has statistics of its own.
    torch.manual_seed(1 + dist.get_rank())
    for step in range(1, 11):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        model.all_reduce()
        optimizer.step()
        if step % 5 == 0:
            check_replicas(model, optimizer, raises=True)  # the hunt


if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        main()
    except LegacyDDPError as error:
        if dist.get_rank() == 0:
            print(error)
    finally:
        dist.destroy_process_group()
