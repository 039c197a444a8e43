"""Records of a comparison: divergences, locations, causes and the verdict. Pure; ``text`` formats them."""

from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["same", "different", "unknown"]
EXIT_STATUS: dict[Verdict, int] = {"same": 0, "different": 1, "unknown": 2}


@dataclass(frozen=True)
class Side:
    """The value of a differing entry on one side.

    ``label``: ``A`` and ``B`` for two runs, ``ranks 0, 2`` for the ranks of one run. ``value``: digest of a tensor or
    text of a setting, None if absent. ``norm``: of the finite elements. ``nonfinite``: number of NaN and infinite
    elements.
    """

    label: str
    value: str | None
    norm: float | None
    nonfinite: int = 0


@dataclass(frozen=True)
class Divergence:
    """A name with differing values in one step and phase.

    ``step``: the step before ``first_step`` (usually 0) is the start. ``phase``: an item of ``PHASES``. ``name``: for
    example ``gradient of 'fc.weight'``. ``kind``: dtype and shape. ``ranks``: for two runs, the ranks on which A and B
    differ in this name; for one run, the ranks outside the majority, or all ranks without a majority.
    """

    step: int
    phase: str
    name: str
    kind: str
    ranks: tuple[int, ...]
    sides: tuple[Side, ...]

    @property
    def parameter(self) -> str | None:
        """Name of the parameter; None for a buffer or a setting of a parameter group."""
        before, quote, rest = self.name.partition("'")
        return rest.rpartition("'")[0] if quote and before != "buffer " else None


@dataclass(frozen=True)
class Location:
    """A step and phase with differences: number of differing names and the ranks on which they differ.

    A location may cover several consecutive compared steps in which the same names differ on the same ranks:
    ``last_step`` is then the last of them (None for a single step) and ``steps`` their number.
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
    """A difference around the training which may explain a divergence.

    ``what``: for example ``threads``. ``sides``: label and value of each side, labelled as in :class:`Side`.
    ``where``: for example ``first at step 7 on rank 1``; empty if the difference is everywhere.
    """

    what: str
    sides: tuple[tuple[str, str], ...]
    where: str = ""


@dataclass(frozen=True)
class MetricDifference:
    """A metric with different sums in two runs.

    ``step``: of the first difference. ``a``, ``b``: the sums there, NaN and infinity as text, None without this metric.
    ``differing``: number of calls with a difference, of ``calls`` compared calls.
    """

    name: str
    step: int
    a: float | str | None
    b: float | str | None
    differing: int
    calls: int


@dataclass(frozen=True)
class OperationRow:
    """A row of the table of operations around the first difference.

    ``numbers``: of the operation in the two steps, from 1, None for a step without it. ``result``: the comparison, in
    words. ``is_first``: the row belongs to the first difference.
    """

    numbers: tuple[int | None, int | None]
    stage: str
    module: str
    name: str
    result: str
    is_first: bool = False


@dataclass(frozen=True)
class OperationFinding:
    """Comparison of the operations of one step: of a rank in two runs, or of two groups of ranks in one.

    ``labels``: of the two sides, as in :class:`Side`. ``ranks``: for two runs the ranks with a difference; for one run
    the ranks outside the majority, or all ranks without a majority; empty without a difference. ``counts``: operations
    of the step, on each side. ``kind``: ``output`` (inputs agree, an output differs), ``input``, ``sequence``
    (operations that only one side has), ``order`` (the same operations in another order), ``form`` (settings, layout
    and the like) or empty without a difference. ``stage``, ``module``, ``name``: of the first different operation; the
    stage is ``forward``, ``backward`` or, between two runs, ``after backward``. ``summary``: one phrase. ``details``:
    differing values. ``earlier``: operations before that only one side has, and whether they are without influence.
    ``meaning``, ``next_step``: sentences. ``rows``: the operations around the difference.
    """

    step: int
    labels: tuple[str, str]
    ranks: tuple[int, ...]
    counts: tuple[int, int]
    kind: str
    summary: str
    meaning: str
    next_step: str = ""
    stage: str = ""
    module: str = ""
    name: str = ""
    details: tuple[str, ...] = ()
    earlier: tuple[str, ...] = ()
    rows: tuple[OperationRow, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """Result of the comparison of two runs, or of the ranks of one run.

    ``folders``: A and B, or the only folder. ``headline``: one sentence. ``steps``: first and last step compared on
    every rank, None without any. ``first``: the first divergence; None unless ``verdict`` is ``different``.
    ``others``: the next few divergences in the same step and phase (for two runs, on the same rank). ``size``: for two
    runs, the greatest relative difference of norms there; None if unknown. ``explanation``: sentences about the first
    divergence. ``causes``: possible causes, likeliest first, with every setting of the optimizer that differs up to
    there, but for ``first`` and ``settings_apart``. ``locations``: the first few, in the order of training;
    ``more_locations``: number of steps and phases with differences beyond ``locations``. ``metrics``: for two runs,
    the first difference of each metric; no part of the verdict. ``operations``: the first different operation of the
    first different step, or of a recorded step without one; None if no operations were compared; no part of the
    verdict. ``notes``: parts of the traces without a comparison, with the reason. ``settings_apart``: the settings
    among these differences that change a step by rounding at most.
    """

    folders: tuple[str, ...]
    verdict: Verdict
    headline: str
    steps: tuple[int, int] | None = None
    first: Divergence | None = None
    others: tuple[Divergence, ...] = ()
    size: float | None = None
    explanation: str = ""
    causes: tuple[Cause, ...] = ()
    locations: tuple[Location, ...] = ()
    more_locations: int = 0
    metrics: tuple[MetricDifference, ...] = ()
    operations: OperationFinding | None = None
    notes: tuple[str, ...] = field(default=())
    settings_apart: tuple[Cause, ...] = ()
