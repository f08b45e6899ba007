"""Figure 9: layer times of all systems, code arrivals; demo models on ShareGPT prompts."""

from moeless_experiments.studies.layer_times import layer_times

EXPERIMENT = layer_times("fig09", "ShareGPT", "code", "sharegpt")
