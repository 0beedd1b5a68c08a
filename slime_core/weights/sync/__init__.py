"""The weight-sync state machine and its canary."""
