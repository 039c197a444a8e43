"""Classes of heat map cells: a level of the colour ramp for a positive value, or a class for a special cell. Pure."""

import numpy as np
from numpy.typing import NDArray

from legacy_ddp.debug._page.binning import Floats

# The classes from RAMP on are the levels of the colour ramp. FLAGGED: ranks differ, or bits without their norms.
ABSENT, ZERO, FLAGGED, NONFINITE, RAMP = range(5)
LEVELS = 200


def classify(values: Floats, decades: float) -> tuple[NDArray[np.uint8], tuple[float, float]]:
    """The class of every value by its logarithm, and the ends of the ramp as exponents of ten.

    The ramp covers at most ``decades`` below the largest value.
    """
    classes = np.full(values.shape, ABSENT, dtype=np.uint8)
    classes[values == 0] = ZERO
    positive = np.nan_to_num(values, nan=0.0) > 0
    logs = np.log10(values[positive])
    if not len(logs):
        return classes, (-1.0, 0.0)
    high = float(logs.max())
    low = max(float(logs.min()), high - decades)
    low, high = (low, high) if high - low > 1e-3 else (low - 0.5, high + 0.5)
    levels = (logs.clip(low, high) - low) / (high - low) * (LEVELS - 1)
    classes[positive] = RAMP + levels.round().astype(np.uint8)
    return classes, (low, high)
