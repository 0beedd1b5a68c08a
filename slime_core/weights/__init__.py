"""Weights on the way from the trainer to the engines."""
