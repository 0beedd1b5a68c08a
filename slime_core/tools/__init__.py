"""Tools that models call during a rollout."""
