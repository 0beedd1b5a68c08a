"""Graders: from a sample to a score."""
