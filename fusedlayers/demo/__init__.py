"""`fusedlayers demo`: a byte-level transformer trained twice, with eager and with fused dense layers."""
