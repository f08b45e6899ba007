"""Recorded gate inputs on disk: what predictors are fitted to.

A directory holds ``manifest.json`` (``manifest``), the model's own gates in
``gates.safetensors`` (``gates``) and shards of tokens (``writer``, ``reader``), so that fitting
needs neither the model nor an engine.
"""

from moeless.learned.shards.gates import fingerprint_gates, read_gates
from moeless.learned.shards.manifest import (
    GATES_FILE,
    MANIFEST_FILE,
    ShardEntry,
    ShardManifest,
    read_manifest,
)
from moeless.learned.shards.reader import GateShards
from moeless.learned.shards.shard import Shard
from moeless.learned.shards.writer import ShardWriter

__all__ = [
    "GATES_FILE",
    "MANIFEST_FILE",
    "GateShards",
    "Shard",
    "ShardEntry",
    "ShardManifest",
    "ShardWriter",
    "fingerprint_gates",
    "read_gates",
    "read_manifest",
]
