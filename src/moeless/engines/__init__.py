"""Serving engines: they hook gates and experts, translate to core types, and decide nothing."""
