"""The one typed configuration tree: CLI flags, YAML and the Prefect form read the same fields."""
