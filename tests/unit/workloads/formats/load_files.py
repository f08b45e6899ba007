"""Small files of recorded loads for the tests of their formats."""

import json

import numpy as np

LOADS = np.array([[5, 1, 2, 4], [3, 3, 0, 6]])


def no_torch(path):
    raise AssertionError("torch was asked for")


def write_safetensors(path, tensors):
    header, body = {}, b""
    for name, array in tensors.items():
        data = np.asarray(array, dtype="<i8").tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "I64", "shape": list(np.shape(array)), "data_offsets": offsets}
        body += data
    head = json.dumps(header).encode()
    path.write_bytes(len(head).to_bytes(8, "little") + head + body)


def write_statistics(path, ranks, *, num_experts=4, top_k=2):
    path.mkdir()
    meta = {"num_experts": num_experts, "num_experts_per_token": top_k}
    (path / "meta_info.json").write_text(json.dumps(meta))
    for rank, tensors in ranks.items():
        write_safetensors(path / f"rank{rank}.safetensors", tensors)


def capture():
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((40, 3, 8)), axis=2)[:, :, :2]
    return ids.astype(np.int16)
