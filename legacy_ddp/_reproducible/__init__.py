"""Sums of micro-batches in the order of a binary tree, the same on any number of ranks."""
