"""Counts, percentiles and events: what a run can be asked about.

Nothing here may know a web framework, an engine, or the function platform.
"""
