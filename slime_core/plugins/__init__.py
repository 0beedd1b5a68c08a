"""Loading code by import path."""
