"""Headers of a call: their exchange, their comparison over all ranks, and the error for a mismatch."""
