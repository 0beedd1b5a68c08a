"""What Prefect's pages show of a run beside its flows and tasks."""
