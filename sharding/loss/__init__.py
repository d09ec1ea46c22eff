"""A loss, traced once: what is proven of it."""
