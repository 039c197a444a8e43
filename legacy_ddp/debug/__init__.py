"""Tools that find the first rank, parameter, step and phase with a difference. The core does not import them."""

from typing import TYPE_CHECKING

from legacy_ddp._errors import lazy_names

# These modules import torch, which the command does not need.
if TYPE_CHECKING:
    from legacy_ddp._explain.element_compare import ElementDifference
    from legacy_ddp._explain.replica_report import ReplicaDifference, ReplicaReport
    from legacy_ddp.debug._check_replicas import check_replicas
    from legacy_ddp.debug._cross import CrossCheck, cross_check
    from legacy_ddp.debug._cross_check.verdict import CrossCheckReport
    from legacy_ddp.debug._operations.digest import digest
    from legacy_ddp.debug._recorder import Recorder
else:
    __getattr__ = lazy_names(
        __name__,
        {
            "CrossCheck": "legacy_ddp.debug._cross",
            "CrossCheckReport": "legacy_ddp.debug._cross_check.verdict",
            "ElementDifference": "legacy_ddp._explain.element_compare",
            "Recorder": "legacy_ddp.debug._recorder",
            "ReplicaDifference": "legacy_ddp._explain.replica_report",
            "ReplicaReport": "legacy_ddp._explain.replica_report",
            "check_replicas": "legacy_ddp.debug._check_replicas",
            "cross_check": "legacy_ddp.debug._cross",
            "digest": "legacy_ddp.debug._operations.digest",
        },
    )

__all__ = [
    "CrossCheck",
    "CrossCheckReport",
    "ElementDifference",
    "Recorder",
    "ReplicaDifference",
    "ReplicaReport",
    "check_replicas",
    "cross_check",
    "digest",
]


def __dir__() -> list[str]:
    return __all__
