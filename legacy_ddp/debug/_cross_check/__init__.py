"""The cross-check: every rank computes the gradients of its own batch and of a batch of another rank."""
