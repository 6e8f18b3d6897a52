"""Small reader for comma separated lines."""
