"""Pure decisions: arrays in, arrays out, one algorithm per file.

``predictors`` expect loads, ``planners`` choose replicas, ``splitters`` divide tokens and
``keep_alive`` says how long idle instances stay. They implement the ports of
``moeless.core.ports``, are chosen by name through the registry in each package's ``__init__``,
and must know neither engines nor the function platform. Numpy and the standard library only.
"""
