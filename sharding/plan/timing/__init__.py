"""The time of a step in closed form: layers, collectives, and all of it together."""
