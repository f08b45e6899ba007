"""Figure 14: replicas by prediction distance."""

from moeless_experiments.studies.paper_settings import by_distance
from moeless_experiments.studies.sweeps import replicas

EXPERIMENT = by_distance("fig14", replicas)
