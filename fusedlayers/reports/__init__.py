"""``explain`` and ``memory_report``: the values that a layer or a model saves, why, and where."""
