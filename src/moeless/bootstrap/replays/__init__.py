"""Replays of traces, a process for each policy."""
