"""Every use of torch's groups, storages, hooks and compiler beyond the public API: to be reviewed when torch changes.

The private names and the versions of torch that have them are in :mod:`~legacy_ddp._torch.private`.
"""

# First, because an ImportError of the other modules does not tell the version of torch that is needed.
from legacy_ddp._torch import private as private

# isort: split
from torch._C import Future  # then() returns this type, not torch.futures.Future
from torch.distributed.algorithms.join import _JoinConfig as JoinConfig
from torch.utils.weak import WeakIdKeyDictionary

from legacy_ddp._torch.compiler import (
    disable_dynamo,
    has_compiled_call,
    inside_backward,
    inside_of_compiled,
    is_tracing,
    profiled,
    skip_tracing,
    skip_tracing_below,
)
from legacy_ddp._torch.dispatch import (
    LEAF_NUMBER,
    LowestMode,
    caller_of_operation,
    current_node,
    has_own_dispatch,
    leaf_of,
    next_node_number,
    node_number,
    operation_name,
    schema_of,
    tags_of,
    unseen,
)
from legacy_ddp._torch.groups import (
    PrefixStore,
    ProcessGroupGloo,
    Store,
    backend_name,
    group_store,
    group_timeout,
    inner_excepthook,
    is_registered,
    keep_for_ever,
    operation_options,
    registered_groups,
)
from legacy_ddp._torch.guards import TensorGuards
from legacy_ddp._torch.hooks import (
    accumulate_hooks,
    add_accumulate_hook,
    attach_hooks,
    before_every_step,
    identity,
    without_accumulate_hooks,
)
from legacy_ddp._torch.memory import (
    flattened,
    foreach_copy,
    foreach_norm,
    grad_dtypes,
    is_only_in_grad,
    preserved_versions,
    ref_counts,
    storage_handles,
    storage_key,
    storage_use_count,
    under_own_storage,
    weak_storage,
)
from legacy_ddp._torch.training import (
    all_scalers,
    calling_scaler,
    has_unscaled,
    largest_used_scaler,
    running_statistics,
    statistics_names,
    unsaved_buffer_names,
    updated_statistics_names,
    version_of,
)

__all__ = [
    "LEAF_NUMBER",
    "Future",
    "JoinConfig",
    "LowestMode",
    "PrefixStore",
    "ProcessGroupGloo",
    "Store",
    "TensorGuards",
    "WeakIdKeyDictionary",
    "accumulate_hooks",
    "add_accumulate_hook",
    "all_scalers",
    "attach_hooks",
    "backend_name",
    "before_every_step",
    "caller_of_operation",
    "calling_scaler",
    "current_node",
    "disable_dynamo",
    "flattened",
    "foreach_copy",
    "foreach_norm",
    "grad_dtypes",
    "group_store",
    "group_timeout",
    "has_compiled_call",
    "has_own_dispatch",
    "has_unscaled",
    "identity",
    "inner_excepthook",
    "inside_backward",
    "inside_of_compiled",
    "is_only_in_grad",
    "is_registered",
    "is_tracing",
    "keep_for_ever",
    "largest_used_scaler",
    "leaf_of",
    "next_node_number",
    "node_number",
    "operation_name",
    "operation_options",
    "preserved_versions",
    "profiled",
    "ref_counts",
    "registered_groups",
    "running_statistics",
    "schema_of",
    "skip_tracing",
    "skip_tracing_below",
    "statistics_names",
    "storage_handles",
    "storage_key",
    "storage_use_count",
    "tags_of",
    "under_own_storage",
    "unsaved_buffer_names",
    "unseen",
    "updated_statistics_names",
    "version_of",
    "weak_storage",
    "without_accumulate_hooks",
]
