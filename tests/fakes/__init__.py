"""Stand-ins for the ports, and what tests need to use them."""
