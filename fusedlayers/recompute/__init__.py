"""Recomputation: sequential networks that recompute segments in backward, and what a second run must find as it was."""
