"""Small exchanges of a call on the control group: rows, JSON values and maxima of all ranks."""

import json
from typing import Any

import torch
import torch.distributed as dist

from legacy_ddp._transport.host_row import SegmentIds, decode_host_rows, encode_host_row
from legacy_ddp._transport.star import Star
from legacy_ddp._transport.wait import Waiter


class Gatherer(Waiter):
    """Exchanges headers, host tensors and JSON values.

    ``segments``: of this rank, to be sent with its header. ``peer_segments``: of all ranks, None before the headers and
    without stars.
    """

    segments = SegmentIds()
    peer_segments: list[SegmentIds] | None = None

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Collective: ``row`` of every rank, host tensors of equal shape s, as a tensor of shape (size, *s)."""
        rows = torch.empty((self.groups.size, *row.shape), dtype=row.dtype, device="cpu")
        if self.groups.size == 1:
            return rows.copy_(row)
        options = self.options("Allgather")
        self.run(self.groups.control, lambda group: group.allgather([list(rows.unbind(0))], [row], options))
        return rows

    def gather_bytes(self, row: bytes) -> list[bytes]:
        """Collective: the bytes of every rank, at least one, and as many on every rank."""
        if self.groups.size == 1:
            return [row]
        rows = bytearray(self.groups.size * len(row))
        gathered = self.gather(torch.frombuffer(bytearray(row), dtype=torch.uint8))
        torch.frombuffer(rows, dtype=torch.uint8).view(gathered.shape).copy_(gathered)
        return [bytes(rows[start : start + len(row)]) for start in range(0, len(rows), len(row))]

    def exchange_headers(self, header: bytes) -> list[bytes]:
        """Collective: the header of every rank; over the star if all ranks are on one host.

        With stars, :attr:`peer_segments` are the segments of every rank afterwards, of other hosts, too: what is mapped
        on a host is known to all.
        """
        if self.groups.star is None:
            return self.gather_bytes(header)
        row = encode_host_row(self.segments, header)
        if self.groups.between is None:
            rows = self.over_star(lambda star, on_slice: star.exchange(row, on_slice))
        else:
            rows = self.gather_bytes(row)
        self.peer_segments, headers = decode_host_rows(rows)
        return headers

    def barrier(self) -> None:
        """Collective on the host, only with a star: return when every rank of the host has arrived."""
        self.over_star(Star.barrier)

    def gather_objects(self, value: Any) -> list[Any]:
        """Collective: the JSON value of every rank, in rank order; tuples arrive as lists."""
        data = json.dumps(value).encode("ascii")  # escapes for all else, also for lone surrogates
        lengths = self.gather(torch.tensor([len(data)], dtype=torch.int64, device="cpu")).flatten().tolist()
        rows = self.gather_bytes(data.ljust(max(lengths)))
        return [json.loads(row) for row in rows]

    def first_problem(self, *problems: str) -> str:
        """Collective: the first problem of any rank with the number of the rank; empty if no rank has one.

        ``problems``: of this rank, texts or empty, as many on every rank. A problem in the first place of any rank goes
        before all problems in the second place.
        """
        rows = self.gather_objects(problems)
        return next(
            (f"rank {rank}: {text}" for texts in zip(*rows, strict=True) for rank, text in enumerate(texts) if text), ""
        )

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: element-wise maximum of a host tensor over the ranks, in place."""
        if self.groups.size > 1:
            options = self.options("Allreduce")
            options.reduceOp = dist.ReduceOp.MAX
            self.run(self.groups.control, lambda group: group.allreduce([values], options))
        return values
