"""The operations of a wrapper: all_reduce, broadcast, construction and join."""
