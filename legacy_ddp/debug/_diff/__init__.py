"""Comparison of two runs, or of the ranks of one run: the first difference, its location and its explanation."""
