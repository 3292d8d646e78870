"""Modules with an inverse: their inputs are freed in forward and computed from their outputs in backward."""
