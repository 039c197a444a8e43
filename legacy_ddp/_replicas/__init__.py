"""Comparison of replicas: digests of parameters, buffers, gradients and optimizers, their history, and evidence."""
