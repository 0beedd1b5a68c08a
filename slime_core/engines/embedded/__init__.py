"""The same protocol on a transformers model, for machines without SGLang."""
