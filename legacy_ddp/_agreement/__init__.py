"""Headers of a call: what each rank is about to do, and the comparison over all ranks.

Imported by the collectives, the replicas and the tools. Imports the transport, the splits of micro-batches and the
kinds of gradients.
"""
