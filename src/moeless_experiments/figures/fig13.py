"""Figure 13: layer time by prediction distance."""

from moeless_experiments.studies.paper_settings import by_distance
from moeless_experiments.studies.sweeps import mean_ms

EXPERIMENT = by_distance("fig13", mean_ms)
