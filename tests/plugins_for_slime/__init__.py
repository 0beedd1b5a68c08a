"""Plug-ins as people write them for slime: they import slime and know nothing of this project."""
