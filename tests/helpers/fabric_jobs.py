"""Trainings by Lightning Fabric, a story each: what strategy ``ddp`` leaves is what ours should leave.

A script of two ranks: ``fabric_jobs.py FOLDER [STORY ...]``.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader

from legacy_ddp import SyncRecord
from legacy_ddp.lightning import LegacyDDPFabricStrategy
from tests.helpers import lightning_jobs
from tests.helpers.lightning_jobs import BOTH, CLASSES, FEATURES, OURS, make_data, state
from tests.helpers.lightning_scenarios import RANKS, Result, Story, run_stories
from tests.helpers.paths import python_blocks


@cache
def start(strategy: Any, precision: Any = "32-true") -> Fabric:
    fabric = Fabric(accelerator="cpu", devices=RANKS, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


def make_net(*, normed: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if normed else nn.Tanh()
    return nn.Sequential(nn.Linear(FEATURES, 8), middle, nn.Linear(8, CLASSES))


def train(fabric: Fabric, net: nn.Module, *, window: int = 1, hook: Any = None) -> tuple[Any, Any]:
    """An epoch, clipped; the last window may be shorter."""
    model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    if hook is not None:
        model._forward_module.register_comm_hook(None, hook)
    loader = fabric.setup_dataloaders(make_data(7))
    for index, (inputs, labels) in enumerate(loader):
        is_last = (index + 1) % window == 0 or index + 1 == len(loader)
        with fabric.no_backward_sync(model, enabled=not is_last):
            fabric.backward(cross_entropy(model(inputs), labels))
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
    return model, optimizer


def accumulating(strategy: str, folder: Path) -> Result:
    model, _ = train(start(strategy), make_net(), window=3)
    return {"state": state(model)}


def hooked(strategy: str, folder: Path) -> Result:
    """Trained in bf16; gradients travel in fp16."""
    model, _ = train(start(strategy, "bf16-mixed"), make_net(), window=3, hook=fp16_compress_hook)
    return state(model)


def checkpoint(strategy: str, folder: Path) -> Result:
    """Save, load into a new model, and go on."""
    fabric = start(strategy)
    model, optimizer = train(fabric, make_net())
    path = folder / f"fabric-{strategy}.ckpt"
    fabric.save(path, {"model": model, "optimizer": optimizer})
    loaded = nn.Sequential(*make_net().children())
    again = fabric.setup(loaded, torch.optim.AdamW(loaded.parameters(), lr=0.05))
    fabric.load(path, {"model": again[0], "optimizer": again[1]})
    return {"saved": dict(torch.load(path, weights_only=False)["model"]), "loaded": state(again[0])}


def normed(strategy: str, folder: Path) -> Result:
    """BatchNorm evaluated after training: torch DDP sends the statistics in forward, here it is a call."""
    fabric = start(strategy)
    model, _ = train(fabric, make_net(normed=True))
    if strategy == "legacy_ddp":
        fabric.strategy.broadcast_buffers()
    model.eval()
    with torch.no_grad():
        output = model(torch.ones(2, FEATURES))
    return {**state(model), "output": output}


def adversaries(strategy: str, folder: Path) -> Result:
    """Two models: one ``backward`` reaches both, the other one of them; ``fake`` is made once and used twice."""
    fabric = start(strategy)
    torch.manual_seed(0)
    nets = nn.Linear(2, FEATURES), nn.Linear(FEATURES, 1)
    (generator, of_generator), (discriminator, of_discriminator) = (
        fabric.setup(net, torch.optim.Adam(net.parameters(), lr=0.01)) for net in nets
    )
    for real, _ in fabric.setup_dataloaders(make_data(4)):
        fake = generator(real[:, :2])
        of_discriminator.zero_grad()
        verdict = discriminator(torch.cat([fake.detach(), real]))
        fabric.backward(mse_loss(verdict, torch.arange(2.0).repeat_interleave(len(real))[:, None]))
        of_discriminator.step()
        of_generator.zero_grad()
        fabric.backward(discriminator(fake).square().mean())
        of_generator.step()
    return {"generator": state(generator), "discriminator": state(discriminator)}


def chosen_model(strategy: str, folder: Path) -> Result:
    """``backward(model=)`` reduces that one alone, whatever else was reached."""
    fabric = start(strategy)
    models = [fabric.setup_module(nn.Linear(1, 1, bias=False)) for _ in range(2)]
    for model in models:
        nn.init.ones_(model.weight)
    inputs = torch.full((1, 1), float(fabric.global_rank + 1))
    fabric.backward(models[1](models[0](inputs)).sum(), model=models[0])
    return {"gradients": [float(model.weight.grad) for model in models]}


def out_of_use(strategy: str, folder: Path) -> Result:
    """A model of which one rank still holds what the other has dropped does not take part any more."""
    fabric = start(strategy)
    old = fabric.setup_module(nn.Linear(1, 1))
    fabric.backward(old(torch.ones(1, 1)).sum())
    if fabric.global_rank == 0:
        del old
    new = fabric.setup_module(nn.Linear(1, 1, bias=False))
    fabric.backward(new(torch.full((1, 1), float(fabric.global_rank + 1))).sum())
    return {"gradient": float(new.weight.grad)}


def without_data(strategy: str, folder: Path) -> Result:
    """A rank whose loss does not reach the only model counts as zeros. The strategy has an argument."""
    fabric = start(LegacyDDPFabricStrategy(timeout_seconds=90.0))  # one that has set up no other
    model = fabric.setup_module(nn.Linear(1, 1, bias=False))
    loss = model(torch.full((1, 1), 4.0)).sum() if fabric.global_rank == 0 else torch.zeros((), requires_grad=True)
    fabric.backward(loss)
    return {"gradient": float(model.weight.grad), "settings": model._forward_module.extra_repr()}


def misused(strategy: str, folder: Path) -> Result:
    """``loss.backward()`` by hand, and ``no_backward_sync`` of a model that another strategy wrapped."""
    model, other = start(strategy).setup_module(make_net()), start("ddp").setup_module(make_net())
    with pytest.raises(RuntimeError) as by_hand:
        model(torch.ones(1, FEATURES)).sum().backward()
    with pytest.raises(TypeError) as not_set_up:
        start(strategy).no_backward_sync(other)
    return {"by hand": str(by_hand.value), "not set up": str(not_set_up.value)}


def own_call(strategy: str, folder: Path) -> Result:
    """The wrapper behind Fabric's, for a call of one's own."""
    fabric = start(strategy)
    model = fabric.setup_module(nn.Linear(1, 1, bias=False))
    with fabric.no_backward_sync(model):
        fabric.backward(model(torch.full((1, 1), float(fabric.global_rank + 1))).sum())
    record: SyncRecord = model._forward_module.all_reduce(sample_size=fabric.global_rank + 1)
    return {"gradient": float(model.weight.grad), "sample_size": record.sample_size}


def of_the_page(strategy: str, folder: Path) -> Result:
    """The loop of docs/lightning.md, over two windows of four batches."""
    (program,) = (block for block in python_blocks("docs/lightning.md") if "import Fabric" in block)
    net = make_net(normed=True)
    data = torch.randn(8 * RANKS * 4, FEATURES, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(data, batch_size=4)
    names = {"model": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "loader": loader}
    exec(compile(program, "docs/lightning.md", "exec"), names)
    asked: SyncRecord = names["model"]._forward_module.all_reduce(skip=True)
    return {"state": state(net), "calls": asked.call - 1}


def by_trainer(strategy: str, folder: Path) -> Result:
    """The Trainer's first story, as both are started by the same launcher."""
    return lightning_jobs.accumulating(strategy, folder)


STORIES: dict[Story, tuple[str, ...]] = {
    accumulating: BOTH,
    hooked: BOTH,
    checkpoint: BOTH,
    normed: BOTH,
    adversaries: BOTH,
    chosen_model: OURS,
    out_of_use: OURS,
    without_data: OURS,
    misused: OURS,
    own_call: OURS,
    of_the_page: OURS,
    by_trainer: OURS,
}


if __name__ == "__main__":
    run_stories(STORIES)
