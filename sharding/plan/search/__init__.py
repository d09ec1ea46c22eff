"""The search for the fastest plan that fits, its file, and its check by compiling."""
