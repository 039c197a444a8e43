"""Settings of the checks of a call: :class:`Checks`."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from typing import Any, Literal, Protocol, get_args, get_origin, get_type_hints, runtime_checkable

from legacy_ddp._errors import argument_errors

CHECKS_VARIABLE = "LEGACY_DDP_CHECKS"
LONGEST_SECONDS = 1e9  # far beyond it timedelta and the transport overflow
# For type checkers and for the check of the arguments.
Level = Literal["off", "info", "detail"]
Uneven = Literal["warn", "raise", "allow"]
UnsynchronizedStep = Literal["raise", "allow"]
Nonfinite = Literal["ignore", "warn", "raise", "skip"]
SameData = Literal["warn", "allow"]
Divergence = Literal["warn", "raise", "ignore"]
Edited = Literal["warn", "raise", "allow"]


@runtime_checkable
class LossScaler(Protocol):
    """The methods of ``torch.amp.GradScaler`` that the checks use."""

    def is_enabled(self) -> bool: ...

    def get_scale(self) -> float: ...


@dataclass(frozen=True, repr=False)
class Checks:
    """Checks of every :meth:`~LegacyDistributedDataParallel.all_reduce`, in addition to the comparison of headers.

    A warning is a record of the logger ``legacy_ddp``, and never raised: an exception on a single rank would leave the
    other ranks waiting.

    The wrapper refuses a setting without effect at its level, with a ValueError: at level ``"off"`` the reactions
    ``"raise"`` and ``"skip"`` of ``nonfinite``, ``divergence`` and ``edited``; at level ``"detail"``
    ``divergence="ignore"``; at other levels ``every`` above 1. A level from the environment refuses no setting, and
    ``"off"`` from there keeps ``nonfinite="skip"``: without it the training would get other weights.

    ``LEGACY_DDP_CHECKS=detail,warn_after_seconds=10`` in the environment overrides a level and fields.

    Args:
        level: ``"off"``: the header alone, as at every level. ``"info"``: also, on CPU, a row of values per rank
            (norm of the local gradient, finite or not). ``"detail"``: also fingerprints of parameters, buffers and
            gradients in every call. After replicas diverged, the next call raises a ReplicaDivergenceError. Only for
            wrappers, not for :func:`all_reduce_gradients`.
        every: with ``"detail"``, only the calls 1, every + 1, 2 every + 1 and so on compare replicas. Above 1 the
            report names the calls between which replicas diverged, but not the phase. Gradients are not compared; the
            numbers of steps are, as at level ``"info"``. Must be equal on all ranks.
        uneven: the reaction to different numbers of micro-batches per rank: ``"warn"`` once a run, on rank 0 (not with
            ``sample_size``, where every item counts the same); ``"raise"`` a DesyncError on every rank, in any call;
            ``"allow"``. With ``unsynchronized_step="raise"``, micro-batches of a step in ``no_sync()`` do not count.
        unsynchronized_step: the reaction if an optimizer's ``step()`` would use gradients that were not reduced since
            the last backward: ``"raise"`` an UnsynchronizedStepError before anything changes, at every level but
            ``"off"``; ``"allow"``. Inside ``no_sync()`` a step is allowed. With ``"raise"``, level ``"info"`` also
            counts the steps between two calls: different numbers are a DesyncError on every rank.
        nonfinite: the reaction if the local gradient of a participating rank holds NaN or infinity: ``"warn"`` in the
            first call of a streak, on rank 0 and in the log of every rank; ``"raise"`` a NonFiniteGradientError on
            every rank, with ranks and parameters, before gradients are exchanged; ``"ignore"``. With ``"skip"`` all
            ranks skip this step and warn as with ``"warn"``: nothing is exchanged, every ``.grad`` is None and
            ``record.skipped`` is True. BatchNorm statistics already include the bad batch, and an infinity that arises
            in the sum itself is not found. ``"raise"`` and ``"skip"`` must be equal on all ranks. No rank warns if one
            has ``"ignore"`` or level ``"off"``. On a device ``"warn"`` warns some calls later, without a wait;
            ``"raise"`` and ``"skip"`` wait for the device.
        grad_scaler: the :class:`torch.amp.GradScaler` that scales the loss, or an object with its methods
            ``is_enabled()`` and ``get_scale()``; None: with ``nonfinite="warn"`` a scaler that has scaled a loss in
            this process. While the scaler is enabled on every rank, with a scale above 1, a non-finite gradient counts
            as its overflow: there is no error and no warning, and its ``step()`` skips on all ranks, because all ranks
            get the infinity. A NaN of another origin is therefore reported only when the scale is down to 1 (16 skipped
            steps from the default). With ``nonfinite="skip"`` pass the scaler on all ranks or on none: in both cases
            its ``step()`` skips. A deep copy shares the scaler, a pickle leaves it out.
        same_data: the reaction if ranks had local gradients of equal norm, to the last bit, in 10 calls in a row, each
            after a backward: ``"warn"`` once a run, on rank 0, but not at level ``"off"``; ``"allow"``, for instance
            for gradients normalised before the call.
        divergence: the reaction of level ``"info"`` if replicas hold different bits. Every parameter is compared within
            16 calls; on a device a difference is found some calls later. ``"warn"`` once for a streak of calls, with
            the report of all ranks, on rank 0 and in the log of every rank, and again for other tensors or ranks, at
            most 5 times in a streak; ``"raise"`` a ReplicaDivergenceError on every rank; ``"ignore"``, for instance for
            weights that differ on purpose. Must be equal on all ranks. ``"detail"`` always raises, in the next call.
            Buffers that only some ranks hold, saved or not, are found in the next call; there the error is a
            LayoutError.
        edited: the reaction if gradients were unscaled by a GradScaler or clipped, in place, between backward and the
            call: ``"warn"`` once, on rank 0 and in the log of every rank; ``"raise"`` an EditedGradientError on every
            rank, before gradients are exchanged; ``"allow"``, for instance for gradients normalised before the call.
            ``"raise"`` must be equal on all ranks. A scaler is known from its second step on. A clip is recognised if
            edited gradients of different directions have the same norm, or the same greatest element, in call after
            call. Other edits are not found. On a device ``"warn"`` finds a clip only with ``nonfinite="raise"`` or
            ``"skip"``, and ``"raise"`` waits for the device in calls with edited gradients.
        local_buffers: names of buffers that may differ between ranks, or patterns (``"*.running_mean"``): neither
            values nor names of these buffers are compared. In any case values are not compared: of buffers that are not
            saved; of buffers that differ and have changed on every rank since the first forward; and of running
            statistics of torch's normalisation layers that differ and have changed on a rank where the layer is in
            training. Statistics of frozen layers are compared.
        warn_after_seconds: seconds that a rank waits, in a call or in a collective of the script, or that a payload
            runs on a device, before a warning names the missing ranks and their activity. In the first two calls the
            first warning is one line. All wrappers on a process group have the value of
            the first, as for ``report_dir``.
        report_dir: the directory for the report file of every rank; None: the system's temporary directory.

    Raises:
        TypeError, ValueError: a value not allowed above.

    Example:
        >>> Checks("detail", nonfinite="raise")
        Checks(level='detail', nonfinite='raise')
        >>> model = LegacyDistributedDataParallel(torch.nn.Linear(2, 1), checks=Checks(uneven="allow"))
    """

    level: Level = "info"
    uneven: Uneven = "warn"
    unsynchronized_step: UnsynchronizedStep = "raise"
    nonfinite: Nonfinite = "warn"
    grad_scaler: LossScaler | None = None
    same_data: SameData = "warn"
    divergence: Divergence = "warn"
    edited: Edited = "warn"
    local_buffers: Sequence[str] = ()
    warn_after_seconds: float = 60.0
    report_dir: str | os.PathLike[str] | None = None
    every: int = 1

    def __repr__(self) -> str:
        changed = [item for item in fields(self) if getattr(self, item.name) != item.default]
        return f"Checks({', '.join(f'{item.name}={getattr(self, item.name)!r}' for item in changed)})"

    @argument_errors
    def __post_init__(self) -> None:
        for name, allowed in _allowed_values().items():
            value = getattr(self, name)
            if value not in allowed:
                raise ValueError(f"checks: {name} is unknown: got {value!r}, expected one of {allowed}")
        object.__setattr__(self, "local_buffers", as_names(self.local_buffers, "checks: local_buffers"))
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise ValueError(
                f"checks: every is not usable: got {self.every!r}, expected a number of calls, an int of at least 1"
            )
        if not is_duration(self.warn_after_seconds):
            raise ValueError(
                f"checks: warn_after_seconds is not usable: got {self.warn_after_seconds!r}, "
                f"expected a positive number of seconds (up to {LONGEST_SECONDS:g})"
            )
        if self.report_dir == "" or not isinstance(self.report_dir, str | os.PathLike | None):
            raise TypeError(f"checks: report_dir is not usable: got {self.report_dir!r}, expected a path or None")
        scaler: object = self.grad_scaler
        if isinstance(scaler, type) or not isinstance(scaler, LossScaler | None):
            raise TypeError(
                f"checks: grad_scaler is not usable: got {scaler!r}, expected a torch.amp.GradScaler, an object with "
                "the methods is_enabled() and get_scale(), or None; for a scaler without them pass an object of your "
                "own that has them: docs/reference.md, section A loss scaler of your own, shows one"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Checks":
        return self  # a copy of the scaler would fail in the middle of a step

    def __copy__(self) -> "Checks":
        return self

    def __getstate__(self) -> dict[str, Any]:
        # Without the scaler: a pickled one would keep its scale for ever, and every NaN would count as its overflow.
        return {**{item.name: getattr(self, item.name) for item in fields(self)}, "grad_scaler": None}

    @cached_property
    def guards_steps(self) -> bool:
        """Whether a step without the call is an error."""
        return self.level != "off" and self.unsynchronized_step == "raise"

    @cached_property
    def nonfinite_policy(self) -> Nonfinite:
        """The reaction to a non-finite gradient."""
        # The environment may set "off" beside "skip". Without the skips the training would get other weights.
        return self.nonfinite if self.level != "off" or self.nonfinite == "skip" else "ignore"

    @cached_property
    def edited_policy(self) -> Edited:
        """The reaction to gradients that were changed before the call."""
        return self.edited if self.level != "off" else "allow"

    @cached_property
    def warns_of_same_data(self) -> bool:
        """Whether to warn of ranks with seemingly the same data."""
        return self.level != "off" and self.same_data == "warn"

    @cached_property
    def counts_steps(self) -> bool:
        """Whether every call compares the numbers of optimizer steps."""
        # "detail" compares the steps themselves if it compares replicas in every call.
        return self.guards_steps and (self.level == "info" or self.every > 1)

    @cached_property
    def rotates_digests(self) -> bool:
        """Whether every call compares a part of the replicas."""
        return self.level == "info" and self.divergence != "ignore"

    @cached_property
    def compares_replicas(self) -> bool:
        """Whether calls compare all of the replicas."""
        return self.level == "detail"


@cache
def _allowed_values() -> dict[str, tuple[str, ...]]:
    hints = get_type_hints(Checks).items()
    return {name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}


def as_checks(checks: Level | Checks) -> Checks:
    """The given checks, or those with the given level. TypeError or ValueError if unusable or without effect."""
    if not isinstance(checks, str | Checks):
        raise TypeError(f"checks is of the wrong type: got {type(checks).__name__}, expected a level (str) or Checks")
    asked = Checks(level=checks) if isinstance(checks, str) else checks
    refuse_without_effect(asked)
    return asked


def refuse_without_effect(checks: Checks) -> None:
    """ValueError for a setting that has no effect at the level of ``checks``."""
    # Not in the constructor of Checks: with a level from the environment, settings of the script may have no effect.
    for name in ("nonfinite", "divergence", "edited") if checks.level == "off" else ():
        if (reaction := getattr(checks, name)) in ("raise", "skip"):
            raise ValueError(
                f"checks: {name}={reaction!r} has no effect at level 'off'; take another level, or leave it out"
            )
    if checks.every > 1 and checks.level != "detail":
        raise ValueError(
            f"checks: every={checks.every} has no effect at level {checks.level!r}, expected level 'detail'; "
            "write Checks('detail', every=...), or leave it out"
        )
    if checks.divergence == "ignore" and checks.level == "detail":
        raise ValueError(
            "checks: divergence='ignore' has no effect at level 'detail', which always raises; take level 'info' for "
            "replicas that differ on purpose"
        )


def as_names(names: Iterable[str], argument: str) -> tuple[str, ...]:
    """``names`` as a tuple; TypeError for a single string or for an item that is no string."""
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


def is_duration(seconds: object) -> bool:
    return isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 < seconds <= LONGEST_SECONDS
