"""What models and engines have used, in GB·s, calls and tokens."""
