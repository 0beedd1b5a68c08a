"""Parameter names, one table per model family, used in both directions."""
