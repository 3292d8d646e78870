"""``fit`` and ``fit_compiled``: the fastest way to train a model within a number of bytes."""
