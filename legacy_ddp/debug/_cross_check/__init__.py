"""The cross-check: every rank computes the gradients of its own batch and of a batch of another rank.

Imports the core, the room of traces, the room of operations, and nothing else of the tools.
"""
