"""Strategies for Lightning. The import registers ``legacy_ddp``, ``legacy_ddp_spawn`` and ``legacy_ddp_fork``.

For the package ``lightning`` only: the Trainer of ``pytorch_lightning`` has different classes and accepts none of these
strategies.
"""

from legacy_ddp._errors import import_error

try:
    from lightning.fabric import strategies as _of_fabric
    from lightning.pytorch import strategies as _of_trainer
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lightning":  # a requirement of lightning is missing
        raise
    raise import_error(
        "legacy_ddp.lightning needs the package lightning, 2.4 or newer, and it is not installed (pytorch_lightning is "
        "a different package); run: pip install 'legacy_ddp[lightning]'"
    ) from error

from legacy_ddp.lightning._strategies import LegacyDDPFabricStrategy, LegacyDDPStrategy

__all__ = ["LegacyDDPFabricStrategy", "LegacyDDPStrategy"]

LegacyDDPStrategy.register_strategies(_of_trainer.StrategyRegistry)
LegacyDDPFabricStrategy.register_strategies(_of_fabric.STRATEGY_REGISTRY)
