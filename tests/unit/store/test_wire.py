"""Layouts and specs survive the way to a worker process."""

import json
import subprocess
import sys

import pytest
from store_checkpoints import open_store, save

from families import FAMILIES
from moeless.core.checkpoint import ExpertLayout, TensorSource
from moeless.engines.transformers.families import family_for
from moeless.engines.transformers.loader import read_config
from moeless.errors import CheckpointError, ModelError
from moeless.functions.links.wire import (
    layout_from_json,
    layout_to_json,
    spec_from_json,
    spec_to_json,
)
from moeless.functions.store import CheckpointIndex

WORKER = """
import json, sys
from pathlib import Path
from moeless.functions.store import ExpertStore
from moeless.functions.links.wire import layout_from_json, spec_from_json
store = ExpertStore(Path(sys.argv[1]), layout_from_json(sys.argv[2]), spec_from_json(sys.argv[3]))
weights = store.load(1, 2)
print(json.dumps([weights.gate.tolist(), weights.down_bias.tolist()]))
"""


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_layout_and_spec_come_back_equal(family, tmp_path):
    save(FAMILIES[family](), tmp_path)
    found, config = read_config(tmp_path)
    assert found is family_for(config)
    layout, spec = found.layout(config, CheckpointIndex(tmp_path)), found.spec(config, "tiny")
    assert layout_from_json(layout_to_json(layout)) == layout
    assert spec_from_json(spec_to_json(spec)) == spec


def test_every_field_of_a_source_travels():
    source = TensorSource(
        keys=("a{layer}.{expert}",),
        fused=True,
        transposed=True,
        interleaved=True,
        codec="fp8_block",
        block=(64, 32),
    )
    layout = ExpertLayout(gate_up=source, down=source, down_bias=source)
    assert layout_from_json(layout_to_json(layout)) == layout


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"gate_up": 3}', '{"gate_up": {"keys": []}}'])
def test_other_text_is_refused(text):
    with pytest.raises(CheckpointError, match="not an expert layout"):
        layout_from_json(text)
    with pytest.raises(ModelError, match="not a model spec"):
        spec_from_json(text)


def test_another_process_reads_the_same_expert(tmp_path):
    save(FAMILIES["gpt_oss"](), tmp_path)
    store = open_store(tmp_path)
    family, config = read_config(tmp_path)
    layout = family.layout(config, CheckpointIndex(tmp_path))
    arguments = [str(tmp_path), layout_to_json(layout), spec_to_json(store.spec)]
    done = subprocess.run(
        [sys.executable, "-c", WORKER, *arguments], capture_output=True, text=True, check=True
    )
    weights = store.load(1, 2)
    assert json.loads(done.stdout) == [weights.gate.tolist(), weights.down_bias.tolist()]


def test_importing_the_platform_does_not_need_torch():
    code = "import moeless.functions.links.wire, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
