"""From a function to what its output tells of its derivative: extrema, kinks, piecewise fits, and the verdict."""
