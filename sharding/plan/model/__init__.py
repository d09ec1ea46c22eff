"""Models: their dims, and what their layers compute and store."""
