"""One figure or table a file; each has an ``EXPERIMENT``."""
