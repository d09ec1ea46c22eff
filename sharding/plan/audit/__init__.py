"""What a compiled program costs: read from its text."""
