"""Looks at everything a run needs before any process starts. Imports neither torch nor Ray."""
