"""Our own: memory and waiting by keep-alive, under traffic with pauses."""

from moeless_experiments.studies.own_sweeps import PAUSES, ask

EXPERIMENT = ask(PAUSES)
