"""Pure functions on tensors: advantages, losses, KL, corrections, reductions."""
