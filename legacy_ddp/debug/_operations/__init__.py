"""Operations of a training step in order: capture on a rank, comparison of two sequences, and its text."""
