"""OUT.npz: what each policy's devices computed and held, so that anyone can recompute figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moeless.core.whole_file import written_whole
from moeless.errors import ConfigError, os_reason
from moeless.simulator.recording import Recording


def write_dump(recordings: Mapping[str, Recording], path: Path) -> None:
    """Write ``P/device_tokens`` [S, L, D] and ``P/replicas`` [S, L, E, D] for each policy P.

    Replicas are numbers of warm copies: 0 or 1, and more where a policy's slots repeat an expert.

    Policies without recorded replicas (the oracle has none) are left out. Equal recordings give
    equal bytes.

    Args:
        recordings: Policy to recording.
        path: Where to; the file appears only when it is whole.

    Raises:
        ConfigError: It cannot be written.
    """
    arrays: dict[str, Any] = {}
    for name, recording in recordings.items():
        if recording.replicas_SLED is not None:
            arrays[f"{name}/device_tokens"] = recording.device_tokens_SLD
            arrays[f"{name}/replicas"] = recording.replicas_SLED
    try:
        with written_whole(path) as partial, partial.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({os_reason(error)})") from error
