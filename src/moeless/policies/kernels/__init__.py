"""The loops that policies share, compiled by numba when they are imported.

Signatures are explicit, so nothing is ever compiled on the token path; machine code is cached on
disk, so only the first import of an installation compiles. Plain loops over arrays with integer
arithmetic and stable ties: equal inputs give equal results on every machine. Argument types are
those of the signatures; shapes are in the docstrings. Must know neither requests nor plans.
"""
