"""The expert store: weights of single experts, straight from a checkpoint's safetensors shards.

``index`` and ``shard`` know files and headers, ``codecs`` quantisation, ``sources`` how a layout
maps to tensors. Importing this package loads torch.
"""

from moeless.functions.store.expert_weights import ExpertWeights
from moeless.functions.store.index import CheckpointIndex
from moeless.functions.store.store import ExpertStore

__all__ = ["CheckpointIndex", "ExpertStore", "ExpertWeights"]
