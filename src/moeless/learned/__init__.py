"""Predictors that compute: copied gates, and each family's rule for choosing experts.

Needs torch, except for ``accuracy``, ``batching``, ``error_estimate`` and ``metrics``. Must know
neither engines nor the function platform: an engine hands over weights, rules and hidden states.
"""
