"""In which order to build."""
