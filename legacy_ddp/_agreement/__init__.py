"""Headers of a call: their exchange, their comparison over all ranks, and the error for a mismatch.

Imported by the collectives, the replicas and the tools. Imports the transport, the splits of micro-batches and the
kinds of gradients.
"""
