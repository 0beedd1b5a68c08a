"""Advantage estimators, one file each."""
