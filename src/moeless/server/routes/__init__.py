"""Endpoints, one group per file."""
