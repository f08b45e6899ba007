"""The supervisor process: it owns workers, pools and placement; engines attach to it.

It outlives an engine's crash and an engine outlives a worker's. It does not need torch.
"""
