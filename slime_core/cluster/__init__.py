"""Ray actors and the processes of a run."""
