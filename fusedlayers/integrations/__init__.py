"""Callbacks and plugins of trainers. Each module is imported by name, and needs the package that it is named after."""
