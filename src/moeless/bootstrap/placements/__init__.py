"""Placements for other systems, from loads that were recorded."""
