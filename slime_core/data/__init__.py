"""Prompts: readers, rendering and data sources."""
