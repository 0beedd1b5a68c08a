"""The seven stages of an iteration as plain async functions (context, refs) -> Ref."""
