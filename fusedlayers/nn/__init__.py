"""Modules: dense and convolution layers, batch norms, MLP blocks, and activations that save their output."""
