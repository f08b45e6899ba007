"""Recorded expert loads and placements in the formats of this and other systems.

One file per format; all readers return ``ExpertLoads``, and ``placements`` reads and writes
placements. Numpy and the standard library only: what needs torch is handed in by the caller.
"""
