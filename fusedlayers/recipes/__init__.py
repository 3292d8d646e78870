"""Every value is saved once: what can be replayed from saved tensors is not saved."""
