"""What experts cost: time models, link times, presets of devices and known models, pricing.

Implements ``core.ports.TimeModel``. Numpy and the standard library only; must know neither
policies nor engines.
"""
