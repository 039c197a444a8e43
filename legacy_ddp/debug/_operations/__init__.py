"""Operations of a training step in order: capture on a rank, comparison of two sequences, and its text.

operation → capture; operation → difference → blocks, influence, order → align → describe → explain
operation → bits, passes → flow, form, turns → structure, which also uses align and describe

Imported by traces, their comparison, the page and the cross-check. Imports the replicas and torch's private interfaces.
"""
