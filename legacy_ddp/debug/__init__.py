"""Tools that find the first rank, parameter, step and phase with a difference.

Imported by users and by the command ``legacy-ddp``; the core never imports it. Imports the core.
"""

from legacy_ddp._replicas.digest import digest
from legacy_ddp._replicas.element_compare import ElementDifference
from legacy_ddp._replicas.report import ReplicaDifference, ReplicaReport
from legacy_ddp.debug._check import check_replicas
from legacy_ddp.debug._recorder import Recorder

__all__ = ["ElementDifference", "Recorder", "ReplicaDifference", "ReplicaReport", "check_replicas", "digest"]
