"""How an engine's tokens reach instances; one file per way. Needs torch."""
