"""Figure 16: replicas by CV threshold."""

from moeless_experiments.studies.paper_settings import by_threshold
from moeless_experiments.studies.sweeps import replicas

EXPERIMENT = by_threshold("fig16", replicas)
