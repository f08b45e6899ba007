"""Our own: layer time by memory."""

from moeless_experiments.studies.own_sweeps import MEMORY, ask

EXPERIMENT = ask(MEMORY)
