"""The composition root: the only place where parts are wired together.

One package for each thing that a user does: ``serving``, ``recording``, ``predictors``,
``replays``, ``placements``; ``policies`` says what a policy's name stands for everywhere.
"""
