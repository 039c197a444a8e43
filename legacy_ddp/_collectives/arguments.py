"""Arguments of an all_reduce, as given by the caller."""

from collections.abc import Mapping
from typing import NamedTuple, SupportsFloat, SupportsIndex

Metrics = Mapping[str, SupportsFloat] | None


class Arguments(NamedTuple):
    """Not checked yet; docs of :meth:`LegacyDistributedDataParallel.all_reduce` have the meaning of each."""

    sample_size: SupportsIndex | None = None
    skip: bool = False
    metrics: Metrics = None
