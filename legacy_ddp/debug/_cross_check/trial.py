"""The examination of one batch after a difference: two runs on every rank, with all operations. Collective."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from legacy_ddp._transport.call import Call
from legacy_ddp.debug._cross_check.exchange import failing_together, gathering_failures, give_to_all
from legacy_ddp.debug._cross_check.passes import Passes
from legacy_ddp.debug._cross_check.ring import Ring
from legacy_ddp.debug._cross_check.verdict import LATER_REPEAT, REPEAT, RING, Digests, Verdict, judge
from legacy_ddp.debug._operations.operation import Operation


@dataclass(frozen=True)
class Trial:
    """The verdict about the batch of rank ``batch``, whose bytes are ``data``.

    ``operations``: of the captured runs on this rank, by the name of the run. ``differing``: names of the results in
    which the two runs of the verdict differ. ``note``: the reason for missing operations, empty without a reason.
    """

    batch: int
    data: torch.Tensor
    verdict: Verdict
    operations: Mapping[str, Sequence[Operation]]
    differing: tuple[str, ...]
    note: str = ""


def try_batch(call: Call, passes: Passes, ring: Ring, batch: int, data: torch.Tensor) -> Trial:
    """Run the batch of rank ``batch`` twice on every rank. ``data``: the batch of this rank.

    Raises:
        PeerError: a run failed, on any rank.
    """
    with call.phase("batch"):
        data = give_to_all(call, data, batch, ring.sizes[batch])
    operations: dict[str, Sequence[Operation]] = {}
    if ring.is_captured:
        operations[RING] = ring.operations.get(batch, [])
    rows, captured, note = _run_twice(call, passes, batch, data)
    operations |= captured
    with call.phase("compare"):
        table = call.gather(torch.tensor(rows, device="cpu")).tolist()
    repeats = [(tuple(first), tuple(second)) for first, second in table]
    following = (batch + 1) % call.groups.size
    own, foreign = ring.own[batch], ring.foreign[following]
    if own is None or foreign is None:
        raise RuntimeError(f"rank {batch} has no batch, and its batch was chosen")
    verdict = judge(batch, own, foreign, repeats)
    if verdict.kind == "once" and ring.is_different_everywhere:
        verdict = replace(verdict, ranks=tuple(rank for rank, size in enumerate(ring.sizes) if size))
    results = {(rank, REPEAT): pair[0] for rank, pair in enumerate(repeats)}
    results |= {(rank, LATER_REPEAT): pair[1] for rank, pair in enumerate(repeats)}
    results |= {(following, RING): foreign, (batch, RING): own}
    odd, reference = (results[witness.rank, witness.run] for witness in (verdict.odd, verdict.reference) if witness)
    differing = tuple(name for name, a, b in zip(passes.names, odd, reference, strict=True) if a != b)
    return Trial(batch, data, verdict, operations, differing, note)


def _run_twice(
    call: Call, passes: Passes, batch: int, data: torch.Tensor
) -> tuple[list[Digests], dict[str, Sequence[Operation]], str]:
    """The digests of two runs, their operations, and the reason for missing operations.

    A run that fails under the capture alone (an operation without support for dispatch modes) is repeated without it:
    the ranks are known then, and the operation is not.
    """
    digests: dict[str, Digests] = {}
    operations: dict[str, Sequence[Operation]] = {}
    with call.phase("run"), gathering_failures(call) as failures:
        for name in (REPEAT, LATER_REPEAT):
            digests[name], operations[name] = passes.run(data, with_operations=True)
    if not failures.ranks:
        return list(digests.values()), operations, ""
    for name in (REPEAT, LATER_REPEAT):
        with call.phase("run"), failing_together(call, f"run with the batch of rank {batch}"):
            digests[name], _ = passes.run(data, with_operations=False)
    return list(digests.values()), {}, f"the capture of operations failed. {failures}"
