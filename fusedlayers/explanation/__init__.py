"""What a layer keeps of an activation, why, and how exact its derivative then is: ``fusedlayers.explain``."""
