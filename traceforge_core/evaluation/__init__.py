"""What models are worth on held-out data, and what they would do next. See `evaluate` and `predict`."""
