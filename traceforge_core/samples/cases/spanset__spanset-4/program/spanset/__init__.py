"""Spans of time."""
