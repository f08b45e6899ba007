"""The arithmetic of experts on a device. Needs torch."""
