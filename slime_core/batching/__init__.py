"""Pure functions on lengths: selection, schedules, packing."""
