"""Comparison of what the ranks hold: digests, their history over the phases of a step, and evidence about a difference.

Imported by the collectives and the tools. Imports the agreement, the transport and the step guard.
"""
