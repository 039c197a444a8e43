"""Comparison of two runs, or of the ranks of one run: the first difference, its location and its explanation.

``compare_runs`` and ``compare_ranks`` collect differences, ``explain`` writes sentences, ``text`` formats the result.
"""
