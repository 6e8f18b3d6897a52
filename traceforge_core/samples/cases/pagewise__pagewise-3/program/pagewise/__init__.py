"""Listings in pages."""
