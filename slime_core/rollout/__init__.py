"""From draws to scored groups."""
