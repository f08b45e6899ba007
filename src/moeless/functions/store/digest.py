"""A fingerprint of one expert's weights, to notice a file that was changed while it is served.

Safetensors files carry no checksum. This one is made at the speed of memory: columns of 4 KiB are
added up and only the sums are hashed. It notices damage and another checkpoint's weights; it is no
protection against somebody who wants to deceive.
"""

import hashlib

import numpy as np
import torch

from moeless.functions.store.expert_weights import ExpertWeights

_WORDS = 512


def digest_weights(weights: ExpertWeights) -> str:
    """The fingerprint of weights, in hexadecimal digits.

    Args:
        weights: As the store reads them: contiguous, on the CPU.
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in weights.tensors():
        raw = tensor.reshape(-1).view(torch.uint8).numpy()
        whole = len(raw) // (8 * _WORDS) * _WORDS
        words = raw[: 8 * whole].view(np.uint64).reshape(-1, _WORDS)
        digest.update(words.sum(axis=0, dtype=np.uint64).tobytes())
        digest.update(raw[8 * whole :].tobytes())
    return digest.hexdigest()
