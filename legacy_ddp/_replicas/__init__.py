"""Comparison of replicas: digests of parameters, buffers, gradients and optimizers, their history, and evidence.

Imported by the collectives and the tools. Imports the agreement, the transport, the buckets, the step guard and
torch's interfaces.
"""
