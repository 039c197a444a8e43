"""The interface of a check: the facts of a rank, and the errors and warnings that follow from the facts of all."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from legacy_ddp._agreement.agree import Agreement, Precedence
from legacy_ddp._agreement.header import Header
from legacy_ddp._buckets.plan import Plan, Planner
from legacy_ddp._collectives.pack import Packed
from legacy_ddp._errors import AgreedError
from legacy_ddp._log import warn
from legacy_ddp._settings import Settings
from legacy_ddp._step_guard.backward_counter import BackwardCounter
from legacy_ddp._transport.call import Call


@dataclass(frozen=True)
class Subject:
    """The parameters to check: their settings, their planner, and their wrapper, None for all_reduce_gradients()."""

    settings: Settings
    planner: Planner
    wrapper: nn.Module | None

    @property
    def wrapper_reference(self) -> Callable[[], nn.Module | None]:
        """A weak reference to the wrapper, which refers to its checks."""
        return (lambda: None) if self.wrapper is None else weakref.ref(self.wrapper)


@dataclass(frozen=True, slots=True)
class LocalStep:
    """What this rank brings to a call. ``counter``: of backward passes. ``header``: the facts for the other ranks."""

    call: Call
    plan: Plan
    packed: Packed
    counter: BackwardCounter
    header: Header


class Check:
    """A check of a set of parameters. A subclass overrides the methods that it needs; the methods here do nothing.

    Every rank has an object of every check, whatever its settings. ``is_on``: the settings of this rank want the check,
    and it was not closed. ``precedence``: the place of the error of :meth:`mismatch` among such errors. ``section``: of
    docs/errors.md, about the warnings of the check.

    Settings may differ between ranks. So a decision that ranks make together (an error, an exchange) follows from the
    facts of all ranks, of which one is a flag that the rank takes part, and from memory that is equal on all ranks.

    The methods are called in this order: ``facts``, ``mismatch``, ``compare``, ``end``, ``observe``. An error in one of
    them ends the call, and the later methods are not called: what ``facts`` has consumed is then gone.

    Example: legacy_ddp/_collectives/check_list.py has short checks.
    """

    precedence = Precedence.OTHER
    section = ""
    is_on = True

    def __init__(self, subject: Subject) -> None:
        """Local; may set :attr:`is_on`."""

    def facts(self, step: LocalStep) -> None:
        """Local, before the exchange: write facts of this rank to ``step.header``. An error reaches all ranks."""

    def mismatch(self, rows: Sequence[Header]) -> AgreedError | None:
        """The error that follows from the headers of all ranks alone. Pure; called on every rank, also without
        ``is_on``, and only if the headers differ."""

    def compare(self, step: LocalStep, agreement: Agreement) -> str | None:
        """The text of a warning that every rank finds, None without one. May raise an AgreedError, on all ranks.

        May be collective, but only where the facts of all ranks decide so. No gradient has moved yet.
        """

    def end(self, step: LocalStep) -> None:
        """Local: every parameter has its new gradient."""

    def observe(self, step: LocalStep, agreement: Agreement) -> str | None:
        """The text of a warning of rank 0 alone, after the call, None without one. Asked until there is a text. Never
        collective."""

    def begin_forward(self, *, is_training: bool) -> None:
        """A forward of the wrapper begins: local, and without effect on the forward."""

    def change_block(self, *, is_open: bool) -> None:
        """The outermost ``no_sync()`` block begins (``is_open``), or has ended: local."""

    def idle_call(self) -> str | None:
        """A call inside no_sync() did nothing: local. The text of a warning, None without one."""

    def restart(self) -> None:
        """All ranks got the parameters of one rank: a difference between earlier calls is repaired."""

    def restart_buffers(self) -> None:
        """All ranks hold equal buffers, or are meant to: at construction, and after a broadcast of the buffers."""

    def forget(self) -> None:
        """The gradients since the last call are dropped."""


class Warnings:
    """The warnings of a set of parameters that wait for the end of the call.

    ``pending``: the rank of the log record, the text, its section, and whether every rank has this text.
    """

    def __init__(self) -> None:
        self.pending: list[tuple[int, str, str, bool]] = []

    def add(self, call: Call, text: str, section: str) -> None:
        """Add a warning of rank 0 alone."""
        self.pending.append((0, call.name_in_full(text), section, False))

    def add_everywhere(self, call: Call, text: str, section: str) -> None:
        """Add a warning that every rank has."""
        self.pending.append((call.groups.rank, call.name_in_full(text), section, True))

    def emit(self) -> None:
        """Show the pending warnings, at the line of the call of :meth:`all_reduce`."""
        while self.pending:
            rank, text, section, is_everywhere = self.pending.pop(0)
            warn(rank, text, section, is_everywhere=is_everywhere)
