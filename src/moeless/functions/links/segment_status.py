"""What became of one segment of an invocation, as hosts say it and the token path reads it."""

OK = 0
NOT_WARM = 1
"""Nothing was computed: the instance has left, or its device."""
FAILED = 2
