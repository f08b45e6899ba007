"""Routing traces in the making: what an engine computes, step by step, becomes a trace.

Read ``recorder`` (what is seen), then ``ledgers`` (how it is kept), ``spool`` (where).
"""
