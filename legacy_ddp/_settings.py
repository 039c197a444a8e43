"""Arguments of the constructor, checked once."""

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

ENVIRONMENT_VARIABLE = "LEGACY_DDP_CHECKS"
TRANSPORT_VARIABLE = "LEGACY_DDP_TRANSPORT"
_TRANSPORTS = ("auto", "gloo", "host")
_REDUCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_LONGEST = 1e9  # seconds; far beyond it timedelta and the transport overflow
_ALLOWED = {
    "level": ("off", "info", "detail"),
    "uneven": ("warn", "raise", "allow"),
    "unsynchronized_step": ("raise", "allow"),
    "nonfinite": ("ignore", "warn", "raise"),
    "same_data": ("warn", "allow"),
}


@runtime_checkable
class LossScaler(Protocol):
    """The used methods of ``torch.amp.GradScaler``."""

    def is_enabled(self) -> bool:
        """Whether the scaler scales."""

    def get_scale(self) -> float:
        """The factor on the loss."""


def _is_duration(seconds: object) -> bool:
    return isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds <= _LONGEST


def as_names(names: Iterable[str], argument: str) -> tuple[str, ...]:
    """``names`` as a tuple. ``argument``: the name of the argument, for the error.

    Raises:
        TypeError: a single string, which would be read as letters, or an item that is no string.
    """
    if isinstance(names, str):
        raise TypeError(
            f"{argument} is of the wrong type: got the string {names!r}, expected several names; write [{names!r}]"
        )
    if not isinstance(names, Iterable):
        raise TypeError(f"{argument} is of the wrong type: got {names!r}, expected several names")
    found = tuple(names)
    if others := [name for name in found if not isinstance(name, str)]:
        raise TypeError(f"{argument} is of the wrong type: got {others[0]!r}, expected names (str)")
    return found


@dataclass(frozen=True, repr=False)
class Checks:
    """Checks of every :meth:`all_reduce`, in addition to the comparison of headers.

    A warning is never raised: if a filter turns warnings into errors (``-W error``), the warning goes to the logger
    ``legacy_ddp``, because an exception on a single rank would leave the other ranks waiting.

    Args:
        level: ``"off"``: the header alone, which every level has. ``"info"``: also, on CPU, a row of values per rank
            (norm of the local gradient, finite or not). ``"detail"``: also fingerprints of parameters, buffers and
            gradients in every call, so that diverged replicas are a ReplicaDivergenceError in the next call; for
            wrappers, not for :func:`all_reduce_gradients`.
        uneven: the reaction to different numbers of micro-batches per rank: ``"warn"`` once a run, on rank 0 (not with
            ``sample_size``, where every item counts the same); ``"raise"`` a DesyncError on every rank, in any call;
            ``"allow"``. Micro-batches of a step in :meth:`no_sync` do not count, if ``unsynchronized_step`` is
            ``"raise"``.
        unsynchronized_step: the reaction if an optimizer's ``step()`` would use gradients that were not reduced since
            the last backward: ``"raise"`` an UnsynchronizedStepError before anything changes, at every level but
            ``"off"``; ``"allow"``. Inside :meth:`no_sync` a step is allowed.
        nonfinite: the reaction if the local gradient of a participating rank holds NaN or infinity: ``"ignore"``;
            ``"raise"`` a NonFiniteGradientError on every rank, naming ranks and parameters, before gradients are
            exchanged; ``"warn"`` on every rank in the first call of a streak, and go on. Must be equal on all ranks;
            level ``"off"`` counts as ``"ignore"``. On CUDA it costs one wait for the device per call.
        grad_scaler: the :class:`torch.amp.GradScaler` that scales the loss. While the scaler is enabled on every rank,
            with a scale above 1, a non-finite gradient counts as its overflow: no error and no warning, and its
            ``step()`` skips on all ranks, because all ranks get the infinity. A NaN of another origin is therefore
            reported after the scale has come down to 1 (16 skipped steps from the default). A deep copy shares the
            scaler, a pickle leaves it out.
        same_data: the reaction if ranks had local gradients of equal norm, to the last bit, in 10 calls in a row, each
            after a backward: ``"warn"`` once a run, on rank 0, but not at level ``"off"``; ``"allow"``, for instance
            for gradients normalised before the call.
        local_buffers: names of buffers that may differ between ranks, or patterns (``"*.running_mean"``): ``"detail"``
            leaves these buffers out.
        warn_after_seconds: seconds that a rank waits before it warns, naming the missing ranks and their activity. On a
            process group the value of the first wrapper counts, as for ``report_dir``.
        report_dir: the directory for the report file of every rank; None: the system's temporary directory.

    Raises:
        TypeError, ValueError: a value not allowed above.
    """

    level: str = "info"
    uneven: str = "warn"
    unsynchronized_step: str = "raise"
    nonfinite: str = "ignore"
    grad_scaler: LossScaler | None = None
    same_data: str = "warn"
    local_buffers: Sequence[str] = ()
    warn_after_seconds: float = 60.0
    report_dir: str | os.PathLike[str] | None = None

    def __repr__(self) -> str:
        changed = [item for item in fields(self) if getattr(self, item.name) != item.default]
        return f"Checks({', '.join(f'{item.name}={getattr(self, item.name)!r}' for item in changed)})"

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"checks: {name} is unknown: got {value!r}, expected one of {allowed}")
        object.__setattr__(self, "local_buffers", as_names(self.local_buffers, "checks: local_buffers"))
        if not _is_duration(self.warn_after_seconds):
            raise ValueError(
                f"checks: warn_after_seconds is not usable: got {self.warn_after_seconds!r}, "
                f"expected a positive number of seconds (up to {_LONGEST:g})"
            )
        if self.report_dir == "" or not isinstance(self.report_dir, str | os.PathLike | None):
            raise TypeError(f"checks: report_dir is not usable: got {self.report_dir!r}, expected a path or None")
        scaler: object = self.grad_scaler
        if isinstance(scaler, type) or not isinstance(scaler, LossScaler | None):
            raise TypeError(
                f"checks: grad_scaler is not usable: got {scaler!r}, expected a torch.amp.GradScaler, or None"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Checks":
        """The same object: the scaler belongs to the loop, and its copy fails in the middle of a step."""
        return self

    def __copy__(self) -> "Checks":
        return self

    def __getstate__(self) -> dict[str, Any]:
        """All fields but the scaler: a copied scaler would keep its scale for ever and excuse every NaN."""
        return {**{item.name: getattr(self, item.name) for item in fields(self)}, "grad_scaler": None}

    @cached_property
    def guards_steps(self) -> bool:
        """Whether a step without the call is an error."""
        return self.level != "off" and self.unsynchronized_step == "raise"

    @cached_property
    def nonfinite_policy(self) -> str:
        """The reaction to a non-finite gradient."""
        return self.nonfinite if self.level != "off" else "ignore"

    @cached_property
    def warns_of_same_data(self) -> bool:
        """Whether to warn of ranks with seemingly the same data."""
        return self.level != "off" and self.same_data == "warn"

    @cached_property
    def compares_replicas(self) -> bool:
        """Whether every call compares the state of the replicas."""
        return self.level == "detail"


def resolve_checks(checks: str | Checks) -> Checks:
    """The checks of the caller, with the level of the environment if ``LEGACY_DDP_CHECKS`` is set.

    Raises:
        TypeError: neither a level nor a :class:`Checks`.
        ValueError: an unknown level, here or in the environment.
    """
    if not isinstance(checks, str | Checks):
        raise TypeError(f"checks is of the wrong type: got {type(checks).__name__}, expected a level (str) or Checks")
    asked = Checks(level=checks) if isinstance(checks, str) else checks
    level = os.environ.get(ENVIRONMENT_VARIABLE)
    if not level:
        return asked
    try:
        return replace(asked, level=level)
    except ValueError as error:
        raise ValueError(f"environment variable {ENVIRONMENT_VARIABLE}: {error}") from error


def resolve_transport(transport: str) -> str:
    """The transport to use: of the environment if ``LEGACY_DDP_TRANSPORT`` is set, else of the caller.

    Raises:
        ValueError: unknown, here or in the environment.
    """
    chosen = os.environ.get(TRANSPORT_VARIABLE)
    if chosen and chosen not in _TRANSPORTS:
        raise ValueError(f"environment variable {TRANSPORT_VARIABLE}: got {chosen!r}, expected one of {_TRANSPORTS}")
    return chosen or transport


@dataclass(frozen=True)
class CommHook:
    """``function(state, bucket)`` starts the communication and returns a Future of the bucket's mean over the ranks.

    Raises:
        TypeError: ``function`` is not callable.
    """

    state: Any
    function: Callable[[Any, Any], Any]

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"hook is not callable: got {self.function!r}, expected hook(state, bucket)")

    def __str__(self) -> str:
        function = self.function
        return f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"

    __repr__ = __str__  # the state may be anything


@dataclass(frozen=True)
class Settings:
    """Arguments carried by a copy of a wrapper besides the module, without ``comm_hook``: its state is not shared.

    Raises:
        TypeError, ValueError: an unusable value; the text names the argument.
    """

    buffer_size: int = 2**28
    gradient_as_bucket_view: bool = True
    reduce_dtype: torch.dtype | None = None
    reproducible: bool = False
    ignore: frozenset[str] = frozenset()
    checks: Checks = Checks()
    timeout_seconds: float | None = None
    transport: str = "auto"
    comm_hook: CommHook | None = None

    def __post_init__(self) -> None:
        size, dtype, seconds = self.buffer_size, self.reduce_dtype, self.timeout_seconds
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(
                f"buffer_size is not usable: got {size!r}, expected a number of elements, an int of at least 1"
            )
        if self.transport not in _TRANSPORTS:
            raise ValueError(f"transport is unknown: got {self.transport!r}, expected one of {_TRANSPORTS}")
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
        if seconds is not None and not _is_duration(seconds):
            raise ValueError(
                f"timeout_seconds is not usable: got {seconds!r}, expected a positive number of seconds "
                f"(up to {_LONGEST:g}), or None"
            )

    def with_hook(self, hook: CommHook) -> "Settings":
        """These settings with a communication hook.

        Raises:
            ValueError: a hook is registered already, or an argument excludes hooks.
        """
        if self.comm_hook is not None:
            raise ValueError(
                f"a communication hook is registered already: got {hook} after {self.comm_hook}, expected one; "
                "construct another wrapper for another hook"
            )
        return replace(self, comm_hook=hook)

    @property
    def shared(self) -> dict[str, str]:
        """The settings that must be equal on all ranks, as text."""
        return {
            "buffer_size": str(self.buffer_size),
            "reduce_dtype": str(self.reduce_dtype),
            "reproducible": str(self.reproducible),
            "comm_hook": str(self.comm_hook),
            "transport": self.transport,
            "uneven": self.checks.uneven,
            'checks="detail"': f"{self.checks.compares_replicas}, local_buffers={sorted(self.checks.local_buffers)}",
            "nonfinite": self.checks.nonfinite_policy,
        }


_TORCH_DDP_IGNORE = "_ddp_params_and_buffers_to_ignore"


def names_to_ignore(module: nn.Module, ignore: Iterable[str]) -> frozenset[str]:
    """The names in ``ignore``, and the names in torch DDP's list of ``module``.

    Raises:
        TypeError: as :func:`as_names`.
    """
    return frozenset(as_names(ignore, "ignore")) | frozenset(getattr(module, _TORCH_DDP_IGNORE, ()))


def check_ignored(module: nn.Module, ignore: Collection[str]) -> None:
    """Refuse names without a parameter or buffer in ``module``, except in torch DDP's own list.

    Raises:
        ValueError: with the unknown names.
    """
    known = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    known |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    unknown = sorted(set(ignore) - known - set(getattr(module, _TORCH_DDP_IGNORE, ())))
    if unknown:
        raise ValueError(
            f"ignore names what the module does not have: got {unknown}, expected parameter or buffer names"
        )
