"""Modules: dense layers, and activations that save their output."""
