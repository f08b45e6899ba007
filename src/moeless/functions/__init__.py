"""The serverless platform: experts as functions.

A *function* is one logical expert of one layer; an *instance* is its weights on one device.
``platform`` decides what is where (pools, plans, budgets) and runs either inside the engine's
process (``local``) or in a ``supervisor`` process of its own; ``host`` holds instances and
computes, in a ``worker`` process or in the engine's; ``token_path`` is the engine's side: it
splits tokens over warm instances and invokes them, through one of the ``invokers``.
Importing this package, its platform and its supervisor does not need torch.
"""
