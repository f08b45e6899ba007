"""Parts of the soak test: a server, traffic, faults, memory, the report."""
