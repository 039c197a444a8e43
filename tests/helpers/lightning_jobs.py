"""Trainings by Lightning's Trainer, a story each: what strategy ``ddp`` leaves is what ours should leave.

A script of two ranks: ``lightning_jobs.py FOLDER [STORY ...]``.
"""

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

from legacy_ddp import Checks, NonFiniteGradientError, UnsynchronizedStepError
from legacy_ddp._torch import group_timeout
from legacy_ddp.lightning import LegacyDDPStrategy
from tests.helpers.lightning_scenarios import QUIET, RANKS, Result, Story, run_stories

FEATURES = 6
CLASSES = 3
BATCH_SIZE = 4
TRAINER = {"accelerator": "cpu", "devices": RANKS, **QUIET}


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


def draw(module: nn.Module) -> float:
    """Give it weights of this rank's own; their sum."""
    torch.manual_seed(dist.get_rank() + 1)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return total(module)


def total(module: nn.Module) -> float:
    return sum(float(parameter.sum()) for parameter in module.parameters())


def state(module: nn.Module) -> Result:
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
        asked, rank = self.trainer.strategy, self.global_rank
        asked.barrier()
        self.answers = {
            "gathered": self.all_gather(inputs.sum()),
            "broadcast": asked.broadcast(f"from {rank}", src=1),
            "mean": asked.reduce(torch.tensor([rank + 1.0]), reduce_op="mean"),
            "all": asked.reduce_boolean_decision(rank == 0),
            "any": asked.reduce_boolean_decision(rank == 0, all=False),
            "sampler": asked.distributed_sampler_kwargs,
        }

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


class Sharded(Plain):
    """Its optimizer splits the state over the ranks; weight decay would move a layer that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(4, 4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        options = {"lr": 0.05, "weight_decay": 0.1}
        return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.AdamW, **options)


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


class _ForCPU(DDPStrategy):
    """Lightning registers hooks on CUDA only; this is what it does there."""

    def _register_ddp_hooks(self) -> None:
        hook = self._ddp_comm_hook if self._ddp_comm_wrapper is None else self._ddp_comm_wrapper(self._ddp_comm_hook)
        self.model.register_comm_hook(state=self._ddp_comm_state, hook=hook)


def _wrapped_hook(hook: Any) -> Any:
    def negated(passed: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return hook(passed, bucket).then(lambda future: -future.value())

    return negated


def hooked(strategy: str, folder: Path) -> Result:
    """Gradients travel in fp16, and a wrapper of the hook turns their sign."""
    module = Plain()
    fit(_with_hook(strategy, ddp_comm_hook=fp16_compress_hook, ddp_comm_wrapper=_wrapped_hook), module)
    return state(module)


def refused(strategy: str, folder: Path) -> Result:
    """Averaged weights with an optimizer that is distributed itself, and SyncBatchNorm on CPU."""
    passed = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=2)
    hook = {"ddp_comm_state": passed, "ddp_comm_hook": post_localSGD_hook, "model_averaging_period": 2}
    with pytest.raises(ValueError, match="ZeroRedundancyOptimizer") as caught:
        fit(_with_hook(strategy, **hook), Sharded())
    with pytest.raises(ValueError, match="GPU"):
        fit(strategy, Normed(), sync_batchnorm=True)
    return {"error": str(caught.value)}


def local_sgd(strategy: str, folder: Path) -> Result:
    """Two steps together, then four alone with the weights averaged after every second."""
    module = Plain()
    alone = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    passed = PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=2)
    options = {"ddp_comm_state": passed, "ddp_comm_hook": post_localSGD_hook, "model_averaging_period": 2}
    fit(_with_hook(strategy, **options), module)
    return state(module)


def _with_hook(strategy: str, **options: Any) -> DDPStrategy:
    return _ForCPU(**options) if strategy == "ddp" else LegacyDDPStrategy(**options)


def first(strategy: str, folder: Path) -> Result:
    """The process group, which the first training of the job makes, and the calls for 11 batches, accumulated by 4."""
    chosen = LegacyDDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=90))
    fit(chosen, Plain(), batches=11, accumulate_grad_batches=4)
    return {"backend": dist.get_backend(), "timeout": group_timeout(dist.group.WORLD), "calls": chosen.record.call}


def accumulating(strategy: str, folder: Path) -> Result:
    """Windows of 4, 4 and 3 batches, clipped."""
    module = Plain()
    fit(strategy, module, batches=11, accumulate_grad_batches=4, gradient_clip_val=0.1)
    return {"state": state(module), "seen": module.seen}


def in_fp16(strategy: str, folder: Path) -> Result:
    """One rank overflows: both skip that step. The checks know that a GradScaler is at work."""
    module, scaler = Overflowing(), torch.amp.GradScaler("cpu")
    chosen: Any = strategy if strategy == "ddp" else LegacyDDPStrategy(checks=Checks(nonfinite="raise"))
    fit(chosen, module, plugins=[MixedPrecision("16-mixed", "cpu", scaler)], gradient_clip_val=0.1)
    return {**state(module), "scale": scaler.get_scale()}


def normed(strategy: str, folder: Path) -> Result:
    """Statistics of BatchNorm after an epoch that ends with a validation, what that one measured, and evaluations."""
    module = Normed()
    trainer = pl.Trainer(strategy=strategy, max_epochs=2, **TRAINER)
    trainer.fit(module, make_data(5), make_data(2))
    last = float(trainer.callback_metrics["validated"])
    left = {**state(module), "last": last, "answers": module.answers}
    validated, tested = trainer.validate(module, make_data(3)), trainer.test(module, make_data(3))
    return {**left, "validated": validated, "tested": tested, "predicted": trainer.predict(module, make_data(3))}


def normed_to_the_end(strategy: str, folder: Path) -> Result:
    """Statistics of BatchNorm where no validation follows, and in a checkpoint from the middle."""
    module = Normed()
    trainer = fit(strategy, module, max_epochs=2)
    trainer.save_checkpoint(path := folder / f"{strategy}-normed.ckpt")
    return {"state": state(module), "saved": dict(torch.load(path, weights_only=False)["state_dict"])}


def adversaries(strategy: str, folder: Path) -> Result:
    module = Adversaries()
    chosen = "ddp_find_unused_parameters_true" if strategy == "ddp" else strategy
    fit(chosen, module)
    return state(module)


def by_hand(strategy: str, folder: Path) -> Result:
    """Two batches to a step, in bf16; ours accumulates in manual optimization, ``ddp`` leaves it to Lightning."""

    class ByHand(Plain):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer, is_last = self.optimizers(), batch_idx % 2 == 1
            with nullcontext() if is_last else self.trainer.strategy.block_backward_sync():
                self.manual_backward(super().training_step(batch) / 2)
            if is_last:
                optimizer.step()
                optimizer.zero_grad()

    module = Plain() if strategy == "ddp" else ByHand()
    fit(strategy, module, precision="bf16-mixed", accumulate_grad_batches=2 if strategy == "ddp" else 1)
    return state(module)


def different_starts(strategy: str, folder: Path) -> Result:
    """Every rank makes a model of its own; training begins with rank 0's."""
    module = Plain()
    drawn = draw(module)
    fit(strategy, module)
    return {"state": state(module), "drawn": drawn}


def configured(strategy: str, folder: Path) -> Result:
    """What the wrapper has of its arguments while it trains, and whether training begins with this rank's weights."""

    class Looking(Plain):
        def on_train_start(self) -> None:
            self.found = {"settings": self.trainer.model.extra_repr().splitlines()[-1], "kept": total(self) == drawn}

    module = Looking()
    drawn = draw(module)
    chosen = LegacyDDPStrategy(
        buffer_size=7,
        init_sync=False,
        gradient_as_bucket_view=False,
        reduce_dtype=torch.bfloat16,
        ignore=["net.0.bias"],
        checks=Checks(nonfinite="raise"),
        timeout_seconds=90.0,
    )
    fit(chosen, module, batches=1)
    return {**module.found, "drawn": drawn}


def sharded(strategy: str, folder: Path) -> Result:
    module = Sharded()
    chosen: Any = "ddp_find_unused_parameters_true"
    if strategy == "legacy_ddp":
        chosen = LegacyDDPStrategy(find_unused_parameters=True)
    fit(chosen, module)
    return state(module)


def resumed(strategy: str, folder: Path) -> Result:
    first, second, whole = Plain(), Plain(), Plain()
    path = folder / f"{strategy}-resumed.ckpt"
    fit(strategy, first).save_checkpoint(path)
    trainer = pl.Trainer(strategy=strategy, max_epochs=2, **TRAINER)
    trainer.fit(second, make_data(6), ckpt_path=path)
    fit(strategy, whole, max_epochs=2)
    saved = dict(torch.load(path, weights_only=False)["state_dict"])
    return {"resumed": state(second), "whole": state(whole), "first": state(first), "saved": saved}


def fitted_twice(strategy: str, folder: Path) -> Result:
    """Fit, step by hand on this rank alone, and fit again: nothing of the wrapper is left in between."""
    module = Plain()
    trainer = fit(strategy, module)
    between = trainer.model is module
    module.net(torch.ones(1, 6)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    fit(strategy, module)
    return {**state(module), "unwrapped": between}


def forgetting(strategy: str, folder: Path) -> Result:
    """A manual loop that runs ``loss.backward()`` itself, where Lightning asks for ``manual_backward``."""

    class Forgetting(Plain):
        automatic_optimization = False

        def training_step(self, batch: Any) -> None:
            super().training_step(batch).backward()
            self.optimizers().step()

    with pytest.raises(UnsynchronizedStepError) as caught:
        fit(strategy, Forgetting())
    return {"error": str(caught.value), "notes": caught.value.__notes__}


def not_finite(strategy: str, folder: Path) -> Result:
    """Rank 1's gradient holds infinity: all ranks raise, and the next training begins as if nothing had been."""
    with pytest.raises(NonFiniteGradientError) as caught:
        fit(LegacyDDPStrategy(checks=Checks(nonfinite="raise")), Overflowing(factor=float("inf")))
    return {"error": str(caught.value), "ranks": caught.value.ranks}


BOTH = ("ddp", "legacy_ddp")
OURS = ("legacy_ddp",)
STORIES: dict[Story, tuple[str, ...]] = {
    first: OURS,
    accumulating: BOTH,
    in_fp16: BOTH,
    normed: BOTH,
    normed_to_the_end: BOTH,
    adversaries: BOTH,
    by_hand: BOTH,
    different_starts: BOTH,
    configured: OURS,
    sharded: BOTH,
    resumed: BOTH,
    fitted_twice: BOTH,
    forgetting: OURS,
    not_finite: OURS,
    hooked: BOTH,
    local_sgd: BOTH,
    refused: BOTH,
}


if __name__ == "__main__":
    run_stories(STORIES)
