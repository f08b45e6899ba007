"""Figure 8: layer times of all systems, conversation arrivals; demo models on arena prompts."""

from moeless_experiments.studies.layer_times import layer_times

EXPERIMENT = layer_times("fig08", "LMSYS-Chat-1M", "conversation", "arena")
