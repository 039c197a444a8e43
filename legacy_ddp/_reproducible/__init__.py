"""Sums of micro-batches in the order of a binary tree, the same on any number of ranks.

Imported by the agreement and the collectives. Imports the buckets and the transport.
"""
