"""Ways to move weights: disk, tensor."""
