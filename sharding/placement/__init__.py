"""Where arrays live: mesh axes, which dim of a parameter is sharded, state specs, train states."""
