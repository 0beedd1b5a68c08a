"""A run's identity and progress: epochs, the planner, recovery."""
