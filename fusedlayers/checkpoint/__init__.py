"""Deeper nets in the same memory: what is needed for the backward pass is computed again, or had from what comes after."""
