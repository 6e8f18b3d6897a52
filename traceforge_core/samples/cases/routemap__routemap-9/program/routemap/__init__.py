"""From paths to handlers."""
