"""Durable Sample batches: Arrow parts, seals, batches and ledgers over object storage."""
