"""The port of a training script from torch DDP: changes of its text, and remarks about what they leave to the user."""
