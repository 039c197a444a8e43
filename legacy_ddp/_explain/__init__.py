"""What a difference between replicas, a missing rank or a NaN means, and whose it is. Runs after a fault alone.

The folder imports the core, and the core knows it as the :class:`~legacy_ddp._explainer.Explainer` alone.
"""

from legacy_ddp import _explainer
from legacy_ddp._explain.compare import explain_replicas
from legacy_ddp._explain.job import describe_job
from legacy_ddp._explain.missing import compose, compose_payload, format_loss, poll_ranks
from legacy_ddp._explain.nonfinite import describe_nonfinite, describe_rank
from legacy_ddp._explain.stall import compose_stall


class _Explanations:
    replicas = staticmethod(explain_replicas)
    nonfinite = staticmethod(describe_nonfinite)
    nonfinite_of_rank = staticmethod(describe_rank)
    poll = staticmethod(poll_ranks)
    waiting = staticmethod(compose)
    payload = staticmethod(compose_payload)
    stall = staticmethod(compose_stall)
    job = staticmethod(describe_job)
    loss = staticmethod(format_loss)


def install() -> None:
    """Let the core ask this folder after a fault."""
    _explainer.install(_Explanations())
