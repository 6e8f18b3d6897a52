"""Readable names for URLs."""
