"""Comparison of two runs, or of the ranks of one: the first difference, where it is, and its meaning, as text or JSON.

compare_runs, compare_ranks → pair, rank_digests → sections → locations → call_diff, environment_diff → explain →
result → text

Imported by the page and the command. Imports the traces.
"""
