"""Counts of backward passes per parameter, and the refusal of optimizer steps without a call.

Imported by the buckets, the reproducible sums, the replicas and the collectives. Imports torch's interfaces and errors.
"""
