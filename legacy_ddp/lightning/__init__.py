"""Strategies for Lightning: importing this registers ``legacy_ddp``, ``legacy_ddp_spawn`` and ``legacy_ddp_fork``.

For the package ``lightning``; classes of ``pytorch_lightning`` are others, and their Trainer takes no strategy of ours.
"""

try:
    from lightning.fabric import strategies as _of_fabric
    from lightning.pytorch import strategies as _of_trainer
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lightning":  # one of its own requirements
        raise
    raise ImportError(
        "legacy_ddp.lightning needs the package lightning, 2.4 or newer, and it is not installed (pytorch_lightning is "
        "another one); run: pip install 'legacy_ddp[lightning]'"
    ) from error

from legacy_ddp.lightning._fabric import LegacyDDPFabricStrategy
from legacy_ddp.lightning._trainer import LegacyDDPStrategy

__all__ = ["LegacyDDPFabricStrategy", "LegacyDDPStrategy"]

LegacyDDPStrategy.register_strategies(_of_trainer.StrategyRegistry)
LegacyDDPFabricStrategy.register_strategies(_of_fabric.STRATEGY_REGISTRY)
