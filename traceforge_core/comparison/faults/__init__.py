"""Wrong implementations, each as small as a real mistake, with which the comparison proves that it can see."""
