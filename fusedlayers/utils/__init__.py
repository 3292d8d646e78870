"""Helpers that several packages share: layouts, graphs, storages, texts, caches, and reports."""
