"""The derivative of a function in terms of its output: extrema, kinks, fits, and whether the output suffices."""
