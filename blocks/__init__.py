"""What a Prefect server must hold for us."""
