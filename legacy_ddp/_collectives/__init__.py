"""The operations that a user calls: all_reduce, broadcast, construction and join, step by step.

Imported by the wrapper and the tools. Imports every room below; nothing else communicates gradients.
"""
