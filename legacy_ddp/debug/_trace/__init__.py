"""Traces of training runs: digests and norms of the state of every rank, one file per rank."""
