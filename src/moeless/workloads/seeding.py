"""The one source of chance of this package: numpy's PCG64, which draws the same everywhere."""

import numpy as np

from moeless.errors import ConfigError


def seeded_generator(seed: int) -> np.random.Generator:
    """A generator that equal seeds make equal.

    Args:
        seed: 0 or more.

    Raises:
        ConfigError: The seed is negative.
    """
    if seed < 0:
        raise ConfigError(f"the seed is {seed}; use 0 or more")
    return np.random.Generator(np.random.PCG64(seed))
