"""The host of one device: it holds instances, and computes invocations on them."""
