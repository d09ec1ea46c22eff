"""What is known of a loss from its trace alone."""
