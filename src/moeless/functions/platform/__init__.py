"""Pools, plans and budgets of all models, in one single-threaded object."""
