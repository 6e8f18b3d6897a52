"""Looks a machine over before anything is trained on it. See `examine`."""
