"""Rewrite models: find layers and activations in what a model computes, fuse them in place, and put them back."""
