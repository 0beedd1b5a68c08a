"""Metrics: registry, outbox, JSONL and MLflow."""
