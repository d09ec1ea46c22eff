"""What a step holds, sends and takes, in closed form."""
