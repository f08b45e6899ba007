"""From a layer's gate to its output, and what the control loop is told meanwhile."""
