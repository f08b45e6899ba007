"""Nouns and ports: what every other package talks about.

Numpy and the standard library only. Shape suffixes used throughout the project:
L MoE layers, E logical experts of a layer, D devices, T tokens, K experts per token,
S = T x K assignments, H hidden size, I intermediate size of one expert.
"""
