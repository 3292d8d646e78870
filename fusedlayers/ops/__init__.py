"""The autograd Functions: what is saved for backward, and the gradients from it."""
