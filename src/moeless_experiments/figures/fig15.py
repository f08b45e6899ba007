"""Figure 15: layer time by CV threshold."""

from moeless_experiments.studies.paper_settings import by_threshold
from moeless_experiments.studies.sweeps import mean_ms

EXPERIMENT = by_threshold("fig15", mean_ms)
