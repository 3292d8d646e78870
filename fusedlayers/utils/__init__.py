"""What has no subject of its own: memory layouts, formatting, a bounded cache."""
