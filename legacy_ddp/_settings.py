"""Arguments of the constructor, checked once; what to do in place of those without effect; environment variables.

``LEGACY_DDP_CHECKS`` has a level, fields of :class:`Checks` and ``timeout_seconds``, ``LEGACY_DDP_TRANSPORT`` a
transport. Both are read when a wrapper is constructed, and override the arguments of the script.
"""

import inspect
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from legacy_ddp._check_settings import (
    CHECKS_VARIABLE,
    LONGEST_SECONDS,
    Checks,
    Level,
    as_checks,
    as_names,
    is_duration,
    refuse_without_effect,
)
from legacy_ddp._errors import argument_errors

AbsentGradients = Literal["none", "zeros"]
Group = dist.ProcessGroup | DeviceMesh
Transport = Literal["auto", "gloo", "host"]
TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
TRANSPORT_VARIABLE = "LEGACY_DDP_TRANSPORT"
_REDUCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DEFAULT_CHECKS = Checks()
_TORCH_DDP_IGNORE = "_ddp_params_and_buffers_to_ignore"
_DEVICE = "leave it out: move module and batches to the device yourself"
# Arguments of the constructor of the wrapper that are not attributes.
SETTINGS = (
    "world_size",
    "buffer_size",
    "init_sync",
    "gradient_as_bucket_view",
    "reduce_dtype",
    "reproducible",
    "absent_gradients",
    "ignore",
    "transport",
    "checks",
    "timeout_seconds",
)


@dataclass(frozen=True)
class CommHook:
    """``function(state, bucket)`` starts the communication and returns a Future of the bucket's mean over the ranks."""

    state: Any
    function: Callable[[Any, Any], Any]

    @argument_errors
    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"hook is not callable: got {self.function!r}, expected hook(state, bucket)")

    def __str__(self) -> str:
        function = self.function
        return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"

    __repr__ = __str__  # the state may be anything


@dataclass(frozen=True)
class Settings:
    """The arguments of a wrapper; TypeError or ValueError for an unusable value.

    ``by_environment``: true for :func:`all_reduce_gradients`, where only environment variables can set them.
    """

    buffer_size: int = 2**28
    gradient_as_bucket_view: bool = True
    reduce_dtype: torch.dtype | None = None
    reproducible: bool = False
    absent_gradients: AbsentGradients = "none"
    ignore: frozenset[str] = frozenset()
    checks: Checks = _DEFAULT_CHECKS
    timeout_seconds: float | None = None
    transport: Transport = "auto"
    comm_hook: CommHook | None = None
    by_environment: bool = False

    def __post_init__(self) -> None:
        size, dtype, seconds = self.buffer_size, self.reduce_dtype, self.timeout_seconds
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(
                f"buffer_size is not usable: got {size!r}, expected a number of elements, an int of at least 1"
            )
        _check_choice("transport", self.transport, TRANSPORTS)
        _check_choice("absent_gradients", self.absent_gradients, get_args(AbsentGradients))
        for name in ("gradient_as_bucket_view", "reproducible"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is not usable: got {getattr(self, name)!r}, expected True or False")
        if dtype is not None and dtype not in _REDUCE_DTYPES:
            raise ValueError(f"reduce_dtype is not usable: got {dtype!r}, expected one of {_REDUCE_DTYPES} or None")
        if dtype is not None and self.reproducible:
            raise ValueError(
                f"reduce_dtype is not usable with reproducible=True: got {dtype!r}, expected None; a micro-batch that "
                "stays on its rank would be rounded otherwise than one that travels"
            )
        for name, value in (("reduce_dtype", dtype), ("reproducible", self.reproducible or None)):
            if value is not None and self.comm_hook is not None:
                raise ValueError(
                    f"a communication hook is not usable with {name}={value!r}: it decides itself what travels and how "
                    f"it is added; construct the wrapper without {name}"
                )
        if seconds is not None and not is_duration(seconds):
            raise ValueError(
                f"timeout_seconds is not usable: got {seconds!r}, expected a positive number of seconds "
                f"(up to {LONGEST_SECONDS:g}), or None"
            )

    @argument_errors
    def with_hook(self, hook: CommHook) -> "Settings":
        """ValueError if there is a hook already, or if an argument excludes hooks."""
        if self.comm_hook is not None:
            raise ValueError(
                f"a communication hook is registered already: got {hook} after {self.comm_hook}, expected one; "
                "construct another wrapper for another hook"
            )
        return replace(self, comm_hook=hook)

    def how_to_check(self, setting: str) -> str:
        """``Checks(uneven=...)``, or ``LEGACY_DDP_CHECKS=uneven=...`` if only the environment can set it."""
        return f"{CHECKS_VARIABLE}={setting.replace(chr(34), '')}" if self.by_environment else f"Checks({setting})"

    def how_to_carry(self, transport: Transport) -> str:
        return f"set {TRANSPORT_VARIABLE}={transport}" if self.by_environment else f'pass transport="{transport}"'

    @property
    def shared(self) -> dict[str, str]:
        """The settings that must be equal on all ranks, as text. Warnings on some ranks only do no harm."""
        nonfinite = self.checks.nonfinite_policy
        return {
            "buffer_size": str(self.buffer_size),
            "reduce_dtype": str(self.reduce_dtype),
            "reproducible": str(self.reproducible),
            "absent_gradients": self.absent_gradients,
            "comm_hook": str(self.comm_hook),
            "transport": self.transport,
            "uneven": self.checks.uneven,
            'checks="detail"': f"{self.checks.compares_replicas}, every={self.checks.every}, "
            f"local_buffers={sorted(self.checks.local_buffers)}",
            "nonfinite": nonfinite if nonfinite in ("raise", "skip") else "warn or ignore",
            "divergence": self.checks.divergence,
            "edited": "raise" if self.checks.edited_policy == "raise" else "warn or allow",
        }


def _check_choice(name: str, value: object, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} is unknown: got {value!r}, expected one of {allowed}")


def names_to_ignore(module: nn.Module, ignore: Iterable[str]) -> frozenset[str]:
    """The names in ``ignore``, and the names in torch DDP's list of ``module``. TypeError as :func:`as_names`."""
    return frozenset(as_names(ignore, "ignore")) | frozenset(getattr(module, _TORCH_DDP_IGNORE, ()))


def check_ignored(module: nn.Module, ignore: Collection[str]) -> None:
    """ValueError for names that are neither in ``module`` nor in torch DDP's own list."""
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    unknown = sorted(set(ignore) - known - set(getattr(module, _TORCH_DDP_IGNORE, ())))
    if unknown:
        raise ValueError(
            f"ignore names what the module does not have: got {unknown}, expected parameter or buffer names"
        )


_ANY_GRAPH = "leave it out: no hook in backward waits for a parameter, so every step may use other parameters"
_BUFFERS = (
    "leave it out: forward never communicates; the constructor sends the buffers of rank 0 (torch DDP with "
    "broadcast_buffers=False does not; name buffers with values of each rank in ignore=), and "
    "model.broadcast_buffers() sends them again where you call it"
)
_BUCKETS = "leave it out: these buckets serve the overlap with backward, and there is no overlap"
_LATER = "leave it out: nothing is reduced before you call all_reduce()"
INSTEAD = {
    "batched_grad_copy": _BUCKETS,
    "broadcast_buffers": _BUFFERS,
    "bucket_cap_mb": _BUCKETS,
    "bucket_cap_mb_list": _BUCKETS,
    "check_reduction": _ANY_GRAPH,
    "delay_all_reduce_named_params": _LATER,
    "device_ids": _DEVICE,
    "device_mesh": "pass the mesh, of one dimension, as process_group=",
    "dim": _DEVICE,
    "find_unused_parameters": _ANY_GRAPH,
    "forward_sync_buffers": _BUFFERS,
    "lazy_bucket_allocation": _BUCKETS,
    "mixed_precision": "use torch.autocast, and reduce_dtype= for what gradients travel in",
    "output_device": _DEVICE,
    "param_to_hook_all_reduce": _LATER,
    "skip_all_reduce_unused_params": _ANY_GRAPH,
    "static_graph": _ANY_GRAPH,
}
_OF_TORCH = frozenset(inspect.signature(DistributedDataParallel).parameters)
_REDUCER = "leave it out: there is no reducer with hooks in backward; the record of all_reduce() describes a call"
# Assignments of scripts. Not here: ``device`` and ``logger`` of torch DDP, which scripts also use for attributes of
# their own.
ATTRIBUTES_INSTEAD = {
    **{name: advice for name, advice in INSTEAD.items() if name not in ("check_reduction", "param_to_hook_all_reduce")},
    # Attributes of fairseq's class.
    "buffer": "leave it out: the wrapper makes its flat tensors itself",
    "need_reduction": "leave it out: every call of all_reduce() outside of no_sync() reduces",
    "per_device_params": "leave it out: the first call after a change of the parameters groups them again",
    # Attributes of torch DDP.
    "_ddp_sink_clone": _REDUCER,
    "_delay_all_reduce_all_params": _LATER,
    "_delay_all_reduce_params": _LATER,
    "_use_python_reducer": _REDUCER,
    "broadcast_bucket_size": "leave it out: broadcasts are cut by themselves",
    "bucket_bytes_cap": _BUCKETS,
    "bucket_bytes_cap_default": _BUCKETS,
    "bucket_bytes_cap_list": _BUCKETS,
    "buffer_hook": _BUFFERS,
    "device_type": _DEVICE,
    "is_multi_device_module": _DEVICE,
    "modules_buffers": _BUFFERS,
    "named_module_buffers": _BUFFERS,
    "parameters_to_ignore": "pass the names as ignore= to the constructor",
    "reducer": _REDUCER,
    "require_backward_grad_sync": (
        "delete this line, and call all_reduce() once behind the last micro-batch: no backward() sends anything"
    ),
    "require_forward_param_sync": _BUFFERS,
    "use_side_stream_for_tensor_copies": _DEVICE,
    **{name: f"pass {name}= to the constructor of a new wrapper" for name in SETTINGS},
}


def refuse_attribute(target: type, name: str) -> None:
    """AttributeError for an assignment that would do nothing: to an attribute of torch DDP or fairseq, or to a setting.

    An attribute of a subclass may have such a name.
    """
    if name not in ATTRIBUTES_INSTEAD:
        return
    found = getattr(target, name, None)
    is_read_only = isinstance(found, property) and found.fset is None
    if is_read_only or not hasattr(target, name):
        missing = "has no setter for" if is_read_only else "has no attribute"
        raise AttributeError(
            f"'{target.__name__}' object {missing} '{name}', and an assignment would do nothing; "
            f"{ATTRIBUTES_INSTEAD[name]}",
            name=name,
        )


def in_their_places(
    world_size: int | Group | None, process_group: Group | int | None, buffer_size: int
) -> tuple[int | None, Group | None, int]:
    """``world_size``, ``process_group`` and ``buffer_size``, also from a call ``(module, process_group, buffer_size)``:
    fairseq's newer class has no ``world_size``. TypeError for two groups, or two sizes of a buffer."""
    if not isinstance(world_size, Group):
        return world_size, process_group, buffer_size  # type: ignore[return-value]  # another type is refused later
    if process_group is None:
        return None, world_size, buffer_size
    if isinstance(process_group, int) and buffer_size == Settings.buffer_size:
        return None, world_size, process_group
    raise TypeError(
        f"arguments are given twice: got {world_size!r}, {process_group!r} and {buffer_size!r} after the module, "
        "expected process_group and buffer_size once each; pass both by keyword"
    )


def refuse_unknown(
    target: type, given: Iterable[str], *signatures: Callable[..., Any], instead: Mapping[str, str] = INSTEAD
) -> None:
    """TypeError, with advice, for names in ``given`` without a parameter in the ``signatures`` of ``target``."""
    parameters = [parameter for taken in signatures for parameter in inspect.signature(taken).parameters.values()]
    known = {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD} - {"self"}
    problems = []
    for name in given:
        if name in known:
            continue
        if name in instead:
            problems.append(f"takes no {name}; {instead[name]}")
        elif name in _OF_TORCH:
            problems.append(f"takes no {name}, unlike torch DDP; leave it out, or use torch DDP")
        else:
            problems.append(f"has no argument {name!r}; expected one of: {', '.join(sorted(known))}")
    if problems:
        raise TypeError("; ".join(f"{target.__name__} {problem}" for problem in problems))


_TIMEOUT = "timeout_seconds"


def resolve_checks(checks: Level | Checks) -> Checks:
    """The checks of the caller, with the level and the fields in ``LEGACY_DDP_CHECKS``."""
    asked = as_checks(checks)
    given = {name: value for name, value in _given().items() if name != _TIMEOUT}
    if not given:
        return asked
    try:
        found = replace(asked, **given)  # the constructor checks the values
        # The settings of the environment alone: its level may make settings of the script ineffective.
        refuse_without_effect(Checks(**{**given, "level": found.level}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"environment variable {CHECKS_VARIABLE}: {error}") from error
    return found


def resolve_timeout(seconds: float | None) -> float | None:
    """``timeout_seconds`` of ``LEGACY_DDP_CHECKS``, else of the caller."""
    chosen = _given().get(_TIMEOUT, seconds)
    if chosen is not seconds and not is_duration(chosen):
        raise ValueError(
            f"environment variable {CHECKS_VARIABLE}: {_TIMEOUT} is not usable: got {chosen!r}, expected a positive "
            f"number of seconds (up to {LONGEST_SECONDS:g})"
        )
    return chosen


def resolve_transport(transport: Transport) -> Transport:
    """The transport in ``LEGACY_DDP_TRANSPORT``, else of the caller."""
    chosen = os.environ.get(TRANSPORT_VARIABLE)
    if chosen and chosen not in TRANSPORTS:
        raise ValueError(f"environment variable {TRANSPORT_VARIABLE}: got {chosen!r}, expected one of {TRANSPORTS}")
    return chosen or transport


def _given() -> dict[str, Any]:
    given: dict[str, Any] = {}
    for item in filter(None, map(str.strip, os.environ.get(CHECKS_VARIABLE, "").split(","))):
        name, is_named, text = map(str.strip, item.partition("="))
        if not is_named:
            name, text = "level", item
        if name not in _READERS:
            raise ValueError(
                f"environment variable {CHECKS_VARIABLE}: got {item!r}, expected a level, or name=value with a name of "
                f"{tuple(_READERS)}"
            )
        if name in given:
            raise ValueError(f"environment variable {CHECKS_VARIABLE}: {name} is set twice; leave one out")
        given[name] = _READERS[name](text)
    return given


def _read_as(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return text  # the constructor refuses it

    return read


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(":")))


# Every field of Checks except the scaler, an object of the script.
_READERS: dict[str, Callable[[str], Any]] = {
    **{item.name: str for item in fields(Checks) if item.name != "grad_scaler"},
    "every": _read_as(int),
    "local_buffers": _read_names,
    "warn_after_seconds": _read_as(float),
    _TIMEOUT: _read_as(float),
}
