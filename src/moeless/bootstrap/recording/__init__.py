"""Routing traces and gate inputs, from a running model."""
