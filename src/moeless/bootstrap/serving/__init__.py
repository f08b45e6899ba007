"""A model that is served: its engine and forecasts, and the process that owns its experts."""
