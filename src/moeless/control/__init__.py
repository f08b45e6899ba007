"""The control loop: predict, plan, diff, apply. Knows only the ports of ``core``."""
