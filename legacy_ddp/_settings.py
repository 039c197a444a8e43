"""Arguments of the constructor but the checks, checked once."""

import os
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import nn

from legacy_ddp._argument_errors import argument_errors
from legacy_ddp._checks import LONGEST_SECONDS, Checks, as_names, is_duration

TRANSPORT_VARIABLE = "LEGACY_DDP_TRANSPORT"
Transport = Literal["auto", "gloo", "host"]
_TRANSPORTS: tuple[Transport, ...] = get_args(Transport)
_REDUCE_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_DEFAULT_CHECKS = Checks()


def resolve_transport(transport: Transport) -> Transport:
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
    """Arguments carried by a copy of a wrapper besides the module, without ``comm_hook``: its state is not shared.

    Raises:
        TypeError, ValueError: an unusable value; the text names the argument.
    """

    buffer_size: int = 2**28
    gradient_as_bucket_view: bool = True
    reduce_dtype: torch.dtype | None = None
    reproducible: bool = False
    ignore: frozenset[str] = frozenset()
    checks: Checks = _DEFAULT_CHECKS
    timeout_seconds: float | None = None
    transport: Transport = "auto"
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
        if seconds is not None and not is_duration(seconds):
            raise ValueError(
                f"timeout_seconds is not usable: got {seconds!r}, expected a positive number of seconds "
                f"(up to {LONGEST_SECONDS:g}), or None"
            )

    @argument_errors
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
            'checks="detail"': f"{self.checks.compares_replicas}, every={self.checks.every}, "
            f"local_buffers={sorted(self.checks.local_buffers)}",
            "nonfinite": "raise" if self.checks.nonfinite_policy == "raise" else "warn or ignore",
            "divergence": self.checks.divergence,
            "edited": "raise" if self.checks.edited_policy == "raise" else "warn or allow",
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
