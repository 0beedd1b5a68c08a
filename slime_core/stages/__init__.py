"""The seven stages of an iteration as plain async functions (context, refs) -> Ref.

An iteration runs without Prefect: call them one after another. Each one asks the store first; what
is sealed there is returned, not done again.
"""
