"""Mutants: faults planted in the library, one at a time, to see which tests find them."""
