"""The private names of torch that the library uses, and the versions of torch that have them: checked at import.

Torch may rename a private name in any version. Then the import of the library raises one clear error.
"""

import re
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module
from typing import NamedTuple

import torch

from legacy_ddp._errors import import_error

OLDEST = "2.8"
SEEN = "2.8 to 2.15"


class PrivateName(NamedTuple):
    """``owner``: the path of a module or class. ``seen``: the versions that have the name."""

    owner: str
    name: str
    seen: str = SEEN

    def exists(self) -> bool:
        """Whether the installed torch has the name: as an attribute, or in the instances of the class."""
        owner = _find(self.owner)
        constructor = getattr(getattr(owner, "__init__", None), "__code__", None)
        of_instances = (*getattr(owner, "__annotations__", ()), *getattr(constructor, "co_names", ()))
        return hasattr(owner, self.name) or self.name in of_instances


def check_torch(version: str, names: Iterable[PrivateName]) -> None:
    """ImportError if ``version`` is older than OLDEST, or if torch lacks one of ``names``."""
    if _number(version) < _number(OLDEST):
        raise import_error(f"legacy_ddp needs torch >= {OLDEST}, found {version}; install a newer torch")
    missing = [name for name in names if not name.exists()]
    if missing:
        told = ", ".join(f"{name.owner}.{name.name} (seen in torch {name.seen})" for name in missing)
        raise import_error(
            f"legacy_ddp uses private names of torch, and torch {version} lacks {told}; "
            "install one of these versions of torch, or a newer legacy_ddp"
        )


def check_python(is_free_threaded: bool) -> None:
    """ImportError in a build of Python without the global interpreter lock, which counts references differently."""
    if is_free_threaded:
        raise import_error("legacy_ddp counts references to gradients, and needs a build of Python with the GIL")


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


def _find(path: str) -> object:
    """The module or attribute at the dotted ``path``; None if it is not there."""
    try:
        return import_module(path)
    except ImportError:
        parent, _, name = path.rpartition(".")
        return getattr(_find(parent), name, None) if parent else None


def _names(owner: str, *names: str) -> Iterator[PrivateName]:
    return (PrivateName(owner, name) for name in names)


PRIVATE_NAMES: Sequence[PrivateName] = (
    *_names("torch", "_disable_dynamo", "_foreach_copy_", "_foreach_norm"),
    *_names("torch._C", "DisableTorchFunction", "Future", "_current_graph_task_id", "_get_tracing_state"),
    *_names("torch._C", "_set_grad_enabled", "_storage_Use_Count", "_to_dlpack"),
    *_names("torch._C", "_DisableTorchDispatch", "_current_autograd_node", "_get_dispatch_stack_at"),
    *_names("torch._C", "_len_torch_dispatch_stack", "_pop_torch_dispatch_stack", "_push_on_torch_dispatch_stack"),
    *_names("torch._C._autograd", "_get_sequence_nr"),
    *_names("torch._C._nn", "flatten_dense_tensors"),
    *_names("torch._C._distributed_c10d", "PrefixStore", "ProcessGroupGloo", "Store"),
    *_names("torch._C._distributed_c10d.Backend.Options", "_timeout"),
    *_names("torch._C._distributed_c10d.ProcessGroupGloo", "_Options", "create_default_device", "create_device"),
    *_names("torch._C._distributed_c10d.ProcessGroupGloo._Options", "_devices", "_threads"),
    *_names("torch._C._dynamo.eval_frame", "_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy"),
    *_names("torch._C._dynamo.guards", "TensorGuards"),
    *_names("torch.ops.aten", "_sparse_coo_tensor_with_dims_and_tensors"),
    *_names("torch.Tensor", "_backward_hooks", "_post_accumulate_grad_hooks", "_use_count", "_version"),
    *_names("torch.UntypedStorage", "_cdata"),
    *_names("torch._ops", "OpOverload"),
    *_names("torch._ops.OpOverload", "_schema"),
    *_names("torch.amp.GradScaler", "_per_optimizer_states", "_scale"),
    *_names("torch.amp.grad_scaler", "OptState"),
    *_names("torch.autograd", "_profiler_enabled"),
    *_names("torch.autograd.Variable", "_execution_engine"),
    *_names("torch.autograd.function", "BackwardCFunction"),
    *_names("torch.autograd.grad_mode", "_unsafe_preserve_version_counter"),
    *_names("torch.autograd.graph", "_engine_run_backward"),
    *_names("torch._C._FunctionBase", "_sequence_nr"),
    *_names("torch.distributed.ProcessGroup", "_device_types", "_get_backend", "_get_sequence_number_for_group"),
    *_names("torch.distributed.algorithms.join", "_JoinConfig"),
    *_names("torch.distributed.distributed_c10d", "_world", "default_pg_timeout"),
    *_names("torch.distributed.distributed_c10d", "AllToAllOptions", "AllgatherOptions"),
    *_names("torch.distributed.distributed_c10d", "AllreduceOptions", "BroadcastOptions"),
    *_names("torch.nn.Module", "_buffers", "_compiled_call_impl", "_non_persistent_buffers_set"),
    *_names("torch.nn.modules.batchnorm", "_NormBase"),
    *_names("torch.optim.Optimizer", "_optimizer_step_pre_hooks"),
    *_names("torch.optim.optimizer", "_global_optimizer_post_hooks", "_global_optimizer_pre_hooks"),
    *_names("torch.utils._python_dispatch", "TorchDispatchMode"),
    *_names("torch.utils.weak", "WeakIdKeyDictionary"),
)

check_python(is_free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")))
check_torch(torch.__version__, PRIVATE_NAMES)
