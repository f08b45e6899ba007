"""Predictors of expert loads: fitted, judged, and put to use on traces."""
