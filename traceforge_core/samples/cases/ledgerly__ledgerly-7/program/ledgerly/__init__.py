"""Shared household bills."""
