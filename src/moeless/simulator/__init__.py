"""Replays routing traces against policies, on the control path that serving runs.

The controller, the policies, the function platform and its state machine are the ones of serving;
only the clock and what executes are simulated. Needs no torch.
"""
