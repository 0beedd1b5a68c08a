"""Measurements on one GPU: python -m benchmarks.gpu.NAME from the repository's folder."""
