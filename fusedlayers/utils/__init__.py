"""Helpers without a subject of their own: memory layouts, formatting, a bounded cache."""
