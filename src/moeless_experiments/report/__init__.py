"""The HTML report of all results in a directory: one file, offline, without scripts.

Built from the manifests and CSV files that are there, not from what a run has in memory, so that
later runs extend it. ``reading`` (what is there), ``markup`` (escaped HTML), ``images``,
``section`` (one experiment), ``overview`` (what holds), ``page`` (the whole).
"""
