"""The seven stages as Prefect tasks."""
