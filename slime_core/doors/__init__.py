"""The ways in besides YAML: slime's command lines, its launch scripts, its model scripts."""
