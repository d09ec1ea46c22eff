"""A loss and its options, and what is known of it from its trace alone."""
