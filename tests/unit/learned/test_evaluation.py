"""Predictors and baselines held against a recording."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fakes.gate_recordings import (  # noqa: E402 - after the skip
    EXPERTS,
    LAYERS,
    RULES,
    TOP_K,
    draw_gates,
    draw_states,
    record_tokens,
)
from moeless.errors import ConfigError, TraceError  # noqa: E402
from moeless.learned.error_estimate import ErrorEstimate  # noqa: E402
from moeless.learned.evaluation import Evaluation  # noqa: E402
from moeless.learned.gate_predictor import GatePredictor  # noqa: E402
from moeless.learned.gate_profile import profile_gates  # noqa: E402
from moeless.learned.history_mix import HistoryMix, fit_weight  # noqa: E402
from moeless.learned.load_predictor import finish_load  # noqa: E402
from moeless.learned.mean_load import average_load  # noqa: E402
from moeless.learned.online_correction import OnlineCorrection  # noqa: E402
from moeless.learned.shards import GateShards  # noqa: E402
from moeless.learned.token_rows import TokenRows  # noqa: E402
from moeless.learned.trained_predictor import TrainedPredictor  # noqa: E402
from moeless.learned.training import original_gates  # noqa: E402
from moeless.learned.transition_table import count_transitions  # noqa: E402


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Layer 2 sees exactly what layer 1 saw."""
    directory = tmp_path_factory.mktemp("seen") / "s"
    return GateShards(record_tokens(directory, still=(2,), conversations=8))


@pytest.fixture
def rows(shards):
    return TokenRows(shards, shards.conversations)


@pytest.fixture
def evaluation(rows):
    return Evaluation(rows, layers=LAYERS, experts=EXPERTS, distance=1, sizes=(16, 64))


def test_a_gate_that_sees_what_will_be_is_always_right(shards, evaluation):
    evaluation.add_predictor("copied", original_gates(shards.gates, 1))
    layers = evaluation.layer_scores("copied", 16)
    assert set(layers) == {1, 2, 3}
    assert layers[2].load_accuracy == layers[2].hot_hit_rate == 1.0
    assert layers[1].load_accuracy < 0.9
    assert evaluation.recall["copied"][1] == 1.0 > evaluation.recall["copied"][0]


def test_true_loads_are_what_the_model_did(rows, evaluation):
    assert evaluation.actual[64].shape == (8 * 150 // 64, LAYERS - 1, EXPERTS)
    assert (evaluation.actual[64].sum(axis=-1) == 64 * TOP_K).all()
    first = next(iter(rows)).topk_ids(1)[:64]
    assert (
        evaluation.actual[64][0, 0] == torch.bincount(first.ravel(), minlength=EXPERTS).numpy()
    ).all()


def test_copied_gates_and_their_trained_form_agree(shards, evaluation):
    evaluation.add_predictor("copied", original_gates(shards.gates, 1))
    evaluation.add_predictor("served", GatePredictor(shards.gates))
    assert (evaluation.expected["copied"][16] == evaluation.expected["served"][16]).all()


def test_histories_see_earlier_batches_only(evaluation):
    def previous(actual_NLE):
        return np.concatenate([np.ones_like(actual_NLE[:1]), actual_NLE[:-1]])

    evaluation.add_history("previous", previous)
    expected, actual = evaluation.expected["previous"][64], evaluation.actual[64]
    assert (expected[0] == 64 * TOP_K / EXPERTS).all()
    assert np.allclose(expected[1:], actual[:-1])


def test_the_mean_is_the_same_for_every_token(rows, evaluation):
    mean = average_load(rows, layers=LAYERS, experts=EXPERTS, distance=1)
    evaluation.add_predictor("mean", mean)
    assert np.allclose(
        evaluation.expected["mean"][16][0], evaluation.actual[16].mean(axis=0), rtol=0.05
    )
    assert mean.predict(0, torch.zeros(10, 12)).sum() == pytest.approx(10 * TOP_K)
    assert mean.predict(LAYERS - 1, torch.zeros(10, 12)) is None
    assert mean.num_bytes == LAYERS * EXPERTS * 4


def test_transitions_are_counted_between_layers(shards, rows, evaluation):
    table = count_transitions(shards.gates, rows, 1)
    evaluation.add_predictor("table", table)
    evaluation.add_predictor(
        "mean", average_load(rows, layers=LAYERS, experts=EXPERTS, distance=1)
    )
    better = evaluation.scores("table", 16).load_accuracy
    assert better > evaluation.scores("mean", 16).load_accuracy
    assert np.allclose(evaluation.expected["table"][16].sum(axis=-1), 16 * TOP_K)
    assert table.shares(LAYERS - 1, torch.zeros(3, 12)) is None
    assert table.num_bytes == (LAYERS - 1) * EXPERTS**2 * 4


def test_too_few_tokens_make_no_evaluation(shards):
    rows = TokenRows(shards, {0}).first(10)
    evaluation = Evaluation(rows, layers=LAYERS, experts=EXPERTS, distance=1, sizes=(16,))
    with pytest.raises(TraceError, match="10 held-out tokens make no recorded batch of 16"):
        evaluation.require_batches()


class TestProfile:
    def test_it_agrees_with_the_evaluation(self, shards, rows, evaluation):
        evaluation.add_predictor("copied", original_gates(shards.gates, 1))
        found = profile_gates(shards.gates, rows, (1, 2), batch=64)
        expected = [s.load_accuracy for s in evaluation.layer_scores("copied", 64).values()]
        assert np.allclose(found.accuracy_nL[0, 1:], expected)
        assert np.allclose(found.recall_nL[0, 1:], evaluation.recall["copied"])
        assert found.batches == len(evaluation.actual[64])

    def test_similarity_is_one_where_nothing_changes(self, shards, rows):
        found = profile_gates(shards.gates, rows, (1, 2), batch=64)
        assert found.cosine_nL[0, 2] == pytest.approx(1.0, abs=1e-5)
        assert found.accuracy_nL[0, 2] == 1.0
        assert abs(found.cosine_nL[0, 1]) < 0.5
        assert np.isnan(found.accuracy_nL[1, :2]).all()
        assert np.isnan(found.cosine_nL[0, 0])

    def test_wrong_distances_are_refused(self, shards, rows):
        with pytest.raises(ConfigError, match="use 1 to 3"):
            profile_gates(shards.gates, rows, (1, 4))

    def test_too_few_tokens_are_refused(self, shards, rows):
        with pytest.raises(TraceError, match="record at least 256"):
            profile_gates(shards.gates, rows.first(20), (1,))


class TestErrorEstimate:
    def test_it_lies_between_the_sizes_measured(self):
        estimate = ErrorEstimate(batches=(16, 256), mean=(0.2, 0.1), p90=(0.3, 0.2))
        assert estimate.mean_at(1) == estimate.mean_at(16) == 0.2
        assert estimate.mean_at(64) == pytest.approx(0.15)
        assert estimate.p90_at(100_000) == 0.2

    @pytest.mark.parametrize(
        "values",
        [
            {"batches": (), "mean": (), "p90": ()},
            {"batches": (16, 8), "mean": (0, 0), "p90": (0, 0)},
            {"batches": (8,), "mean": (float("nan"),), "p90": (0,)},
            {"batches": (8,), "mean": (0, 1), "p90": (0,)},
        ],
    )
    def test_numbers_that_do_not_go_together_are_refused(self, values):
        with pytest.raises(ConfigError, match="error estimate"):
            ErrorEstimate(**values)


class TestOnlineCorrection:
    def test_a_steady_error_is_halved(self):
        correction = OnlineCorrection(rate=0.5, strength=0.5)
        expected, actual = np.array([8.0, 2.0]), np.array([5.0, 5.0])
        assert (correction.correct(0, expected) == expected).all()
        for _ in range(30):
            correction.observe(0, expected, actual)
        assert np.allclose(correction.correct(0, expected), [6.5, 3.5], atol=0.01)
        assert (correction.correct(1, expected) == expected).all()

    def test_it_scales_with_the_tokens_and_never_falls_below_none(self):
        correction = OnlineCorrection(rate=1.0, strength=1.0)
        correction.observe(0, np.array([1.0, 0.0]), np.array([0.0, 7.0]))
        corrected = correction.correct(0, np.array([10.0, 90.0]))
        assert corrected.tolist() == [0.0, 100.0]

    def test_steps_without_tokens_teach_nothing(self):
        correction = OnlineCorrection()
        correction.observe(0, np.zeros(2), np.array([1.0, 1.0]))
        correction.observe(0, np.array([1.0, 1.0]), np.zeros(2))
        assert correction.correct(0, np.array([3.0, 1.0])).tolist() == [3.0, 1.0]

    @pytest.mark.parametrize("options", [{"rate": 0.0}, {"strength": 1.1}])
    def test_wrong_options_are_refused(self, options):
        with pytest.raises(ConfigError, match="online correction"):
            OnlineCorrection(**options)


class TestHistoryMix:
    def test_the_weight_follows_what_is_steady(self):
        generator = np.random.default_rng(0)
        steady = np.tile([30.0, 10.0, 8.0], (40, 1))
        noise = generator.uniform(0, 30, (40, 3))
        assert fit_weight(noise, steady)[0] == 1.0
        assert fit_weight(steady, steady) == (0.0, 0.0)
        assert fit_weight(noise[:1], steady[:1]) == (0.0, 0.0)

    def test_it_mixes_and_keeps_the_sum(self):
        mix = HistoryMix({0: 0.25})
        assert mix.mix(0, np.array([8.0, 0.0]), np.array([0.0, 2.0])).tolist() == [6.0, 2.0]
        assert mix.mix(1, np.array([8.0, 0.0]), np.array([0.0, 2.0])).tolist() == [8.0, 0.0]
        assert mix.mix(0, np.array([8.0, 0.0]), None).tolist() == [8.0, 0.0]


class TestTrainedPredictor:
    def test_loads_are_whole_and_sum_to_the_assignments(self):
        predictor = TrainedPredictor(draw_gates()[1:], 1, hidden=12, spreads=[0.5] * 3)
        states = draw_states(33)
        load_E = predictor.predict(0, states[:, 0].reshape(3, 11, 12))
        assert load_E.dtype == np.float64
        assert load_E.sum() == pytest.approx(33 * TOP_K)
        assert (predictor.predict(0, states[:0, 0]) == 0.0).all()
        assert predictor.predict(3, states[:, 0]) is None
        assert predictor.num_layers == LAYERS
        assert predictor.error(0) is None

    @pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
    @pytest.mark.parametrize("spread", [0.0, 0.7])
    def test_loads_are_the_sums_of_shares(self, rule, spread):
        predictor = TrainedPredictor(draw_gates(rule)[1:], 1, hidden=12, spreads=[spread] * 3)
        states = draw_states(40)[:, 1]
        summed_E = predictor.shares(1, states).sum(dim=0).numpy()
        assert np.allclose(predictor.predict(1, states), summed_E, rtol=1e-5)

    def test_other_numbers_of_spreads_are_refused(self):
        with pytest.raises(ConfigError, match="2 spreads for 3 models"):
            TrainedPredictor(draw_gates()[1:], 1, hidden=12, spreads=[0.5] * 2)


def test_finished_loads_are_not_negative_and_have_the_sum():
    assert finish_load(np.array([-1.0, 1.0, 3.0]), 8).tolist() == [0.0, 2.0, 6.0]
    assert finish_load(np.zeros(2), 0).tolist() == [0.0, 0.0]
