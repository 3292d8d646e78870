"""Deeper nets in the same memory: what the backward pass needs is computed again, or had from what comes after it."""
