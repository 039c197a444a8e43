"""The operations of a wrapper: all_reduce, broadcast, construction and join.

The wrapper and the tools import this folder. The folder imports every room above ``_collectives`` in docs/design.md.
"""
