"""Modules: dense and convolution layers, MLP blocks, and activations that save their output."""
