"""Explicit data parallelism for torch: gradient synchronisation in a single visible call."""

from typing import TYPE_CHECKING

from legacy_ddp._check_settings import Checks
from legacy_ddp._errors import (
    AgreedError,
    CommHookError,
    DesyncError,
    EditedGradientError,
    GradientError,
    LayoutError,
    LegacyDDPError,
    LostPeerError,
    NonFiniteGradientError,
    PeerError,
    PeerLostError,
    ReplicaDivergenceError,
    SyncTimeoutError,
    TraceError,
    TransportError,
    UnsynchronizedStepError,
    check_system,
    lazy_names,
)
from legacy_ddp._statistics import NoiseScale

check_system()

# These modules import torch. The command legacy-ddp imports this package, and reads traces without torch.
if TYPE_CHECKING:
    from legacy_ddp import data as data  # attributes, and no part of __all__
    from legacy_ddp import debug as debug
    from legacy_ddp._record import RankRow, SyncRecord
    from legacy_ddp._wrapper import LegacyDistributedDataParallel, all_reduce_gradients
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "LegacyDistributedDataParallel": "legacy_ddp._wrapper",
            "RankRow": "legacy_ddp._record",
            "SyncRecord": "legacy_ddp._record",
            "all_reduce_gradients": "legacy_ddp._wrapper",
        },
        submodules=("data", "debug"),
    )

__all__ = [
    "AgreedError",
    "Checks",
    "CommHookError",
    "DesyncError",
    "EditedGradientError",
    "GradientError",
    "LayoutError",
    "LegacyDDPError",
    "LegacyDistributedDataParallel",
    "LostPeerError",
    "NoiseScale",
    "NonFiniteGradientError",
    "PeerError",
    "PeerLostError",
    "RankRow",
    "ReplicaDivergenceError",
    "SyncRecord",
    "SyncTimeoutError",
    "TraceError",
    "TransportError",
    "UnsynchronizedStepError",
    "all_reduce_gradients",
]


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "data", "debug"])


__version__ = "0.2.0"
