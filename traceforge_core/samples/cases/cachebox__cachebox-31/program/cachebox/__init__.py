"""A cache of bounded size."""
