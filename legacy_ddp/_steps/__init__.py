"""Counts of backward passes per parameter, and the refusal of optimizer steps without a call."""
