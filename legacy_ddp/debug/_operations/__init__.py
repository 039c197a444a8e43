"""Operations of a training step in order: capture on a rank, comparison of two sequences, and its text.

operation → capture; operation → difference → blocks, influence, order → align, structure → describe → explain

Imported by traces, their comparison, the page and the cross-check. Imports the replicas and torch's private interfaces.
"""
