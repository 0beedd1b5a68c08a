"""`slime contract`: tries a function of one's own on realistic data before any run does."""
