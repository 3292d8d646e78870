"""``memory_report``: what a model keeps for its backward pass, by module and operation, and what its peak is."""
