"""Tools for finding out which rank, which parameter, which step and which phase went wrong first."""

from legacy_ddp._replicas.digest import digest
from legacy_ddp._replicas.elements import ElementDifference
from legacy_ddp._replicas.report import ReplicaDifference, ReplicaReport
from legacy_ddp.debug._check import check_replicas

__all__ = ["ElementDifference", "ReplicaDifference", "ReplicaReport", "check_replicas", "digest"]
