"""Where load comes from: routing traces, arrivals, prompts, and the formats of other systems.

Numpy and the standard library only, except where a format needs an optional extra. Must know
neither policies nor engines.
"""
