"""A stand-in: SGLang names IPython's display for notebooks."""
