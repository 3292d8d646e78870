"""``explain`` and ``memory_report``: what a layer saves and why, what a model saves and where."""
