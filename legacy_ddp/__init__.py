"""Explicit data parallelism for torch: gradient synchronisation in a single visible call."""

from legacy_ddp._checks import Checks
from legacy_ddp._collectives.all_reduce import all_reduce_gradients
from legacy_ddp._errors import (
    AgreedError,
    CommHookError,
    DesyncError,
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
)
from legacy_ddp._record import RankRow, SyncRecord
from legacy_ddp._statistics import NoiseScale
from legacy_ddp._wrapper import LegacyDistributedDataParallel

__all__ = [
    "AgreedError",
    "Checks",
    "CommHookError",
    "DesyncError",
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

__version__ = "0.1.0"
