"""What a layer keeps and why, what a model keeps and where, and the commands that print it."""
