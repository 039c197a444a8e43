"""Counts of backward passes per parameter, and the refusal of optimizer steps without a call.

Imported by the buckets, the collectives and the replicas. Imports errors only.
"""
