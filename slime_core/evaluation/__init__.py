"""Held-out evaluation: datasets, pass@k, what is still owed."""
