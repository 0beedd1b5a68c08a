"""What happens, in what order: Prefect flows over the stages of slime_core."""
