"""Experts that are far larger than memory cost the engine nothing."""

import json
import subprocess
import sys

from safetensors.torch import load_file, save_file
from store_checkpoints import write_header

from families import make_tiny
from moeless.engines.transformers.loader import load_engine_model

EXPERTS, LAYERS, HIDDEN, INTERMEDIATE = 64, 3, 32, 131072

MEASURE = """
import resource, sys
from pathlib import Path
import torch, transformers
from moeless.engines.transformers.loader import load_engine_model
from moeless.functions.store import ExpertStore
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
import transformers.models.mixtral.modeling_mixtral, transformers.generation.utils
before = peak()
loaded = load_engine_model(Path(sys.argv[1]))
after = peak()
store = ExpertStore(loaded.directory, loaded.layout, loaded.spec)
store.validate()
for expert in range(8):
    store.load(1, expert)
print(after - before, peak() - after, store.bytes_of_function)
"""


def make_huge(directory):
    """A Mixtral of 9.7 GB, nearly all of it experts that are holes in a sparse file."""
    model = make_tiny("mixtral", num_local_experts=EXPERTS)
    model.save_pretrained(directory, save_original_format=False)
    tensors = {
        key: value
        for key, value in load_file(directory / "model.safetensors").items()
        if "experts" not in key
    }
    (directory / "model.safetensors").unlink()
    save_file(tensors, directory / "small.safetensors")
    places, entries, end = dict.fromkeys(tensors, "small.safetensors"), {}, 0
    for layer in range(LAYERS):
        for name, shape in {
            "gate_up_proj": [EXPERTS, 2 * INTERMEDIATE, HIDDEN],
            "down_proj": [EXPERTS, HIDDEN, INTERMEDIATE],
        }.items():
            begin, end = end, end + 4 * shape[0] * shape[1] * shape[2]
            key = f"model.layers.{layer}.mlp.experts.{name}"
            entries[key] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
            places[key] = "huge.safetensors"
    write_header(directory / "huge.safetensors", entries, end)
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((directory / "config.json").read_text())
    config["intermediate_size"] = INTERMEDIATE
    (directory / "config.json").write_text(json.dumps(config))


def test_neither_engine_nor_store_holds_experts_that_nobody_asked_for(tmp_path):
    make_huge(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    engine, store, function = map(int, done.stdout.split())
    assert function == 3 * HIDDEN * INTERMEDIATE * 4
    assert engine < 4 * function
    assert store < 4 * function


def test_the_engine_reads_no_byte_of_an_expert(tmp_path, monkeypatch):
    from moeless.functions.store.index import CheckpointIndex

    make_tiny("olmoe").save_pretrained(tmp_path)
    read, real = [], CheckpointIndex.read_into

    def note(index, key, begin, buffer):
        read.append(key)
        real(index, key, begin, buffer)

    monkeypatch.setattr(CheckpointIndex, "read_into", note)
    load_engine_model(tmp_path)
    assert read
    assert not [key for key in read if ".experts." in key]
