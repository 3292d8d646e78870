"""`fusedlayers demo`: a byte-level transformer trained twice, with PyTorch's layers and with fused ones."""
