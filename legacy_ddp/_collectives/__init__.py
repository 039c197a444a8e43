"""The operations of a wrapper: all_reduce, broadcast, construction and join.

The wrapper and the tools import this folder. It imports every room above it in docs/design.md.
"""
