"""Placements in the formats of this and other systems, one file per format."""
