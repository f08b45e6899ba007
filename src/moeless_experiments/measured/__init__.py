"""Experts that really run: real workers on this machine, and devices one after another.

``layer_shape`` (random checkpoints), ``workload`` (recorded routing, as chosen experts),
``workers`` (policies on worker processes), ``emulation`` (each device's share in turn),
``calibration`` (a time model of what was measured), ``replaying`` (the simulator on the same
steps), ``intervals`` (how sure a ratio is).
"""
