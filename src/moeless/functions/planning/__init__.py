"""Between the platform and the control loop: what it is told, what becomes of its plans."""
