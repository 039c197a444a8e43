"""Sums of micro-batches in the order of a binary tree, the same on any number of ranks.

Imported by the agreement, the collectives and the sampler. Imports the buckets, the transport, the step guard and
torch's interfaces.
"""
