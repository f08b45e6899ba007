"""From what a user calls a model to a directory that holds it."""

import os
import re
from pathlib import Path

from moeless.errors import CheckpointError, os_reason

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")

ALLOWED_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "merges.txt",
    "vocab.txt",
)
"""What is downloaded of a hub repository: never code, never pickles."""

IGNORED_FILES = ("*/*", "consolidated*")
"""Second copies of the weights in other formats, as some repositories have them."""


def resolve_model(name: str, *, local_files_only: bool = False) -> Path:
    """Find a model's directory, downloading a hub repository where needed.

    Args:
        name: A directory, or a hub id ``OWNER/NAME``.
        local_files_only: Use what is in the hub cache, never the network.

    Raises:
        CheckpointError: No such directory; a hub id that is neither cached nor reachable, or is
            unknown or gated.
    """
    check_model_name(name)
    path = Path(name).expanduser()
    return path if path.is_dir() else _download(name, local_files_only=local_files_only)


def check_model_name(name: str) -> None:
    """Refuse what can be neither a directory nor a hub id, without a look at the hub.

    Raises:
        CheckpointError: No such directory, or a file.
    """
    if name.endswith(".gguf"):
        raise CheckpointError(
            f"{name} is a GGUF file; only safetensors are read: give the directory of the "
            f"original model"
        )
    path = Path(name).expanduser()
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise CheckpointError(f"{name} cannot be read: {os_reason(error)}") from error
    if name and is_directory:
        if os.access(path, os.R_OK | os.X_OK):
            return
        raise CheckpointError(f"{name} cannot be read; ask its owner for permission to")
    if name and exists:
        raise CheckpointError(f"{name} is a file; give the directory that holds config.json")
    if name.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(name):
        raise CheckpointError(
            f"{name or repr(name)} is not a directory; give a model directory or a hub id such as "
            f"OWNER/NAME"
        )


def _download(name: str, *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        found = snapshot_download(
            name,
            allow_patterns=list(ALLOWED_FILES),
            ignore_patterns=list(IGNORED_FILES),
            local_files_only=local_files_only,
        )
    except GatedRepoError as error:
        raise CheckpointError(
            f"{name} is gated on the hub; accept its licence there and set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name} is neither a directory nor a repository on the hub; check the name, and set "
            f"HF_TOKEN if it is private"
        ) from error
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{name} is neither a directory nor in the hub cache, and the hub cannot be reached; "
            f"download it where there is a network, or give a directory"
        ) from error
    except (HfHubHTTPError, OSError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{name} cannot be downloaded: {reason}") from error
    return Path(found)
