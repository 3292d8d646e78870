"""What needs a GPU, for whoever has one for ten minutes: ``python -m bench gpu-check --out DIR`` (``check.py``)."""
