"""What does a comparison of traces find? Records, told as text elsewhere. Pure."""

from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["same", "different", "unknown"]
EXIT_STATUS: dict[Verdict, int] = {"same": 0, "different": 1, "unknown": 2}


@dataclass(frozen=True)
class Side:
    """One value of a thing that is held differently: whose, and what.

    ``label``: ``A`` and ``B`` for two runs, ``ranks 0, 2`` for the ranks of one. ``word``: digest or setting, None for
    nothing. ``norm``: of a tensor's finite elements. ``nonfinite``: how many of its elements are not.
    """

    label: str
    word: str | None
    norm: float | None
    nonfinite: int = 0


@dataclass(frozen=True)
class Divergence:
    """One thing that is held differently in one step.

    ``step``: 0 (the one before ``first_step``) is the start. ``phase``: one of ``PHASES``. ``name``: such as
    ``gradient of 'fc.weight'``. ``kind``: dtype and shape. ``ranks``: of two runs, those on which they differ in it; of
    one run, those outside the majority, all where there is none.
    """

    step: int
    phase: str
    name: str
    kind: str
    ranks: tuple[int, ...]
    sides: tuple[Side, ...]

    @property
    def parameter(self) -> str | None:
        """The parameter concerned; None for a buffer or a setting of a whole group."""
        before, quote, rest = self.name.partition("'")
        return rest.rpartition("'")[0] if quote and before != "buffer " else None


@dataclass(frozen=True)
class Place:
    """One phase of a step in which anything differs: how many of its names do, and on which ranks.

    ``last_step``: of several compared steps one after the other in which the same names differ on the same ranks; None
    for a single step. ``steps``: how many they are.
    """

    step: int
    phase: str
    ranks: tuple[int, ...]
    differing: int
    total: int
    last_step: int | None = None
    steps: int = 1


@dataclass(frozen=True)
class Cause:
    """A difference around the training that may explain one inside it.

    ``what``: such as ``threads``. ``sides``: label and value of each, as in :class:`Side`. ``where``: such as ``first
    at step 7 on rank 1``, empty if everywhere.
    """

    what: str
    sides: tuple[tuple[str, str], ...]
    where: str = ""


@dataclass(frozen=True)
class Comparison:
    """What comparing two runs, or the ranks of one, found.

    ``folders``: A and B, or the only one. ``headline``: one sentence. ``steps``: first and last that were compared on
    every rank, None if none was. ``first``: the first divergence; None unless ``verdict`` is ``different``. ``others``:
    of its step and phase (and of two runs its lowest rank), the next few. ``size``: of two runs, the greatest relative
    difference of norms there; None if one cannot be told. ``meaning``: what it means, in sentences. ``causes``: what
    may explain it, likeliest first. ``places``: the first few phases that differ, in the order of training;
    ``more_places``: how many phases of a step are in none of them. ``notes``: what was not compared, and why.
    """

    folders: tuple[str, ...]
    verdict: Verdict
    headline: str
    steps: tuple[int, int] | None = None
    first: Divergence | None = None
    others: tuple[Divergence, ...] = ()
    size: float | None = None
    meaning: str = ""
    causes: tuple[Cause, ...] = ()
    places: tuple[Place, ...] = ()
    more_places: int = 0
    notes: tuple[str, ...] = field(default=())
