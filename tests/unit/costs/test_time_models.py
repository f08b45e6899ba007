import json

import numpy as np
import pytest

from moeless.core.model import ExpertShape
from moeless.costs.models import known_model
from moeless.costs.table import TableTime
from moeless.costs.time_models import TIME_MODEL_NAMES, build_time_model
from moeless.errors import ConfigError

MIXTRAL = known_model("mixtral-8x7b").expert
QWEN = known_model("qwen3-30b-a3b").expert


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def test_the_h200_model_of_a_measured_shape_has_the_fitted_coefficients():
    model = build_time_model("h200", MIXTRAL, 8)
    assert (model.cost.base_s, model.cost.touch_s, model.cost.token_s) == (65e-6, 72e-6, 0.637e-6)
    assert model.cost.transfer_s == pytest.approx(4096 * 2 / 450e9)
    assert model.label.startswith("measured")


def test_the_h200_model_of_another_shape_is_scaled_and_says_so():
    model = build_time_model("h200", QWEN, 8)
    assert model.cost.touch_s == pytest.approx(3 * 2048 * 768 * 2 / 4.8e12)
    assert model.cost.token_s == pytest.approx(0.536e-6 * (2048 * 768) / (5120 * 8192))
    assert model.label.startswith("scaled")


def test_the_a6000_model_reads_weights_and_computes_at_its_own_rates():
    model = build_time_model("a6000", MIXTRAL, 8)
    assert model.cost.touch_s == pytest.approx(352_321_536 / 768e9)
    assert model.cost.token_s == pytest.approx(0.637e-6 * 989.4 / 154.8)
    assert model.label.startswith("scaled")


def test_the_papers_model_has_only_the_a6000s_tokens_and_transfers():
    paper, a6000 = (build_time_model(name, MIXTRAL, 8) for name in ("paper", "a6000"))
    assert (paper.cost.base_s, paper.cost.touch_s) == (0.0, 0.0)
    assert paper.cost.token_s == a6000.cost.token_s
    assert paper.cost.transfer_s == pytest.approx(4096 * 2 / 56.25e9)


def test_float32_experts_take_twice_the_arithmetic_and_the_bytes():
    half, full = (
        build_time_model("h200", ExpertShape(hidden=512, intermediate=256, dtype=dtype), 2).cost
        for dtype in ("bfloat16", "float32")
    )
    assert full.token_s == pytest.approx(2 * half.token_s)
    assert full.touch_s == pytest.approx(2 * half.touch_s)
    assert full.transfer_s == pytest.approx(2 * half.transfer_s)


@pytest.mark.parametrize("name", TIME_MODEL_NAMES)
def test_a_single_device_transfers_nothing(name):
    assert build_time_model(name, MIXTRAL, 1).cost.transfer_s == 0.0


def test_no_device_at_all_is_refused():
    with pytest.raises(ConfigError, match="0 devices"):
        build_time_model("h200", MIXTRAL, 0)


def test_a_layer_takes_as_long_as_its_slowest_device_and_the_transfers():
    model = build_time_model("h200", MIXTRAL, 2)
    tokens = np.array([[100, 0], [0, 40], [0, 30]])
    busiest = max(65e-6 + 72e-6 + 100 * 0.637e-6, 65e-6 + 2 * 72e-6 + 70 * 0.637e-6)
    assert model.device_s(tokens).max() == pytest.approx(busiest)
    assert model.layer_s(tokens) == pytest.approx(busiest + 2 * 100 * model.cost.transfer_s)


def test_a_file_of_coefficients_is_read_with_absent_ones_as_zero(tmp_path):
    path = write(tmp_path / "fast.json", {"token_s": 2e-6, "touch_s": 1e-5})
    model = build_time_model(path, MIXTRAL, 8)
    assert model.layer_s(np.array([[10, 0], [0, 5]])) == pytest.approx(1e-5 + 10 * 2e-6)
    assert model.label == "file: fast.json"


TABLE = {
    "tokens": [10, 20, 40],
    "touched": [1, 3],
    "seconds": [[1.0, 2.0], [2.0, 3.0], [4.0, 5.0]],
}


def test_a_table_interpolates_between_its_points_and_goes_on_beyond_them(tmp_path):
    model = build_time_model(write(tmp_path / "t.json", TABLE), MIXTRAL, 8)
    assert isinstance(model, TableTime)
    tokens = np.array([10, 15, 15, 40, 50, 1, 40])
    touched = np.array([1, 1, 2, 3, 3, 1, 5])
    expected = [1.0, 1.5, 2.0, 5.0, 6.0, 1.0, 6.0]
    assert model.seconds(tokens, touched) == pytest.approx(expected)


def test_a_table_times_devices_by_their_tokens_and_touched_experts(tmp_path):
    content = TABLE | {"transfer_s": 0.01, "label": "bench"}
    model = build_time_model(write(tmp_path / "t.json", content), MIXTRAL, 8)
    tokens = np.array([[20, 5, 0], [0, 5, 0], [0, 5, 0]])
    assert model.device_s(tokens) == pytest.approx([2.0, 2.5, 0.0])
    assert model.layer_s(tokens) == pytest.approx(2.5 + 2 * 0.01 * 20)
    assert model.layer_s(np.zeros((3, 3), dtype=np.int64)) == 0.0
    assert model.label == "bench"


def test_the_linear_cost_of_a_linear_table_is_exact(tmp_path):
    tokens, touched = [1, 64, 512, 4096], [1, 2, 8]
    seconds = [[5e-5 + 7e-5 * b + 6e-7 * a for b in touched] for a in tokens]
    content = {"tokens": tokens, "touched": touched, "seconds": seconds, "transfer_s": 1e-8}
    cost = build_time_model(write(tmp_path / "t.json", content), MIXTRAL, 8).cost
    assert cost.base_s == pytest.approx(5e-5)
    assert cost.touch_s == pytest.approx(7e-5)
    assert cost.token_s == pytest.approx(6e-7)
    assert cost.transfer_s == 1e-8


def test_a_table_may_leave_out_how_many_experts_were_touched(tmp_path):
    content = {"tokens": [1, 100], "seconds": [1.0, 2.0]}
    model = build_time_model(write(tmp_path / "t.json", content), MIXTRAL, 8)
    assert model.seconds(np.array([100, 199]), np.array([1, 6])) == pytest.approx([2.0, 3.0])
    assert model.cost.token_s > 0


def test_a_noisy_table_never_gets_faster_with_more_work(tmp_path):
    content = {"tokens": [1, 2, 4], "seconds": [1.0, 0.9, 2.0]}
    model = build_time_model(write(tmp_path / "t.json", content), MIXTRAL, 8)
    assert model.seconds(np.array([2]), np.array([1])) == pytest.approx([1.0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ([1], "expected a JSON object"),
        ({}, "token_s is missing"),
        ({"token_s": 0}, "token_s is 0"),
        ({"token_s": -1}, "token_s is -1"),
        ({"token_s": "1"}, "token_s is '1'; give a number"),
        ({"token_s": True}, "token_s is True; give a number"),
        ('{"token_s": NaN}', "token_s is nan"),
        ('{"token_s": 1%s}' % ("0" * 400), "token_s is too large"),
        ({"token_s": 1, "tuch_s": 1}, "unknown key 'tuch_s'"),
        ({"token_s": 1, "label": 3}, "label must be text"),
        ({"seconds": [1, 2]}, "tokens is missing"),
        ({"tokens": [1, 2], "seconds": [1, "2"]}, "seconds must be"),
        ({"tokens": [1, 2], "seconds": [[1], [1, 2]], "touched": [1]}, "rows of equal length"),
        ({"tokens": [], "seconds": []}, "tokens"),
        ({"tokens": [1], "seconds": [1.0]}, "tokens needs a list of 2"),
        ({"tokens": [2, 1], "seconds": [1.0, 2.0]}, "tokens must be positive and ascending"),
        ({"tokens": [1, 2], "touched": [0], "seconds": [[1], [2]]}, "touched must be positive"),
        ({"tokens": [1, 2], "touched": [1, 2], "seconds": [[1], [2]]}, "expected one row"),
        ({"tokens": [1, 2], "touched": [1], "seconds": [1, 2]}, "expected one row"),
        ({"tokens": [1, 2], "seconds": [1.0, 0.0]}, r"seconds\[1\]\[0\] is 0.0"),
        ({"tokens": [1, 2], "seconds": [1.0, 1.0]}, "do not grow with tokens"),
        ({"tokens": [1, 2], "seconds": [1.0, 2.0], "transfer_s": -1}, "transfer_s is -1"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line_that_names_it(tmp_path, content, message):
    path = tmp_path / "wrong.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        write(path, content)
    with pytest.raises(ConfigError, match=message) as caught:
        build_time_model(str(path), MIXTRAL, 8)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["h20o", "no/such/file.json", "x" * 5000])
def test_neither_a_name_nor_a_file_is_refused_with_the_names(name):
    with pytest.raises(ConfigError, match="neither paper, h200, a6000 nor a file"):
        build_time_model(name, MIXTRAL, 8)


def test_a_directory_is_not_a_time_model(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        build_time_model(str(tmp_path), MIXTRAL, 8)
