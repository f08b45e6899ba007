"""Learning from live tokens: what is sampled, when it is fitted, and what is put in place."""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from fakes.gate_recordings import EXPERTS, HIDDEN, LAYERS, draw_gates, draw_states  # noqa: E402
from moeless.errors import ConfigError  # noqa: E402 - after the skip
from moeless.learned.first_layers_learning import FirstLayersLearning  # noqa: E402
from moeless.learned.live_learning import LiveLearning  # noqa: E402
from moeless.learned.live_options import LiveOptions  # noqa: E402
from moeless.learned.live_sample import LiveSample  # noqa: E402

OPTIONS = LiveOptions(held_out_tokens=256, first_fit_tokens=128, chunk_tokens=64)


def sample_of(layers, **options):
    """A sample that costs nothing, so that no step is left out to save time."""
    return LiveSample(layers, **{"clock": lambda: 0.0, **options})


def run_step(sample, states_TLH):
    for layer in range(states_TLH.shape[1]):
        sample.note(layer, states_TLH[:, layer])


class TestSample:
    def test_a_few_tokens_of_a_step_come_out_with_all_their_layers(self):
        sample, states = sample_of(LAYERS, least_rows=4), draw_states(32)
        run_step(sample, states)
        assert sample.waiting_tokens == 4
        taken = sample.take()
        assert taken.shape == (4, LAYERS, HIDDEN)
        for token in taken:
            assert (states == token).all(dim=(1, 2)).sum() == 1
        assert sample.take() is None
        assert sample.waiting_tokens == 0

    @pytest.mark.parametrize(
        ("tokens", "expected"), [(1, 1), (3, 3), (4, 4), (63, 4), (160, 10), (4096, 32)]
    )
    def test_long_steps_give_more_but_not_without_bound(self, tokens, expected):
        sample = sample_of(LAYERS)
        run_step(sample, torch.zeros(tokens, LAYERS, HIDDEN))
        assert len(sample.take()) == expected

    def test_each_step_takes_other_rows(self):
        sample, rows = sample_of(1, capacity_tokens=1000), torch.arange(30.0)[:, None, None]
        for _ in range(40):
            run_step(sample, rows)
        assert len(sample.take().unique()) == 30

    def test_what_waits_is_bounded_whatever_the_traffic(self):
        sample = sample_of(LAYERS, capacity_tokens=64)
        for _ in range(100):
            run_step(sample, torch.zeros(512, LAYERS, HIDDEN))
            assert sample.waiting_tokens < 64 + 32
        assert sample.left_out_steps == 98
        assert len(sample.take()) == 64
        run_step(sample, torch.zeros(512, LAYERS, HIDDEN))
        assert sample.waiting_tokens == 32

    def test_a_step_that_broke_off_or_missed_a_layer_leaves_nothing(self):
        sample, states = sample_of(LAYERS), draw_states(8)
        run_step(sample, states[:, : LAYERS - 1])
        for layer in (0, 1, 3):
            sample.note(layer, states[:, layer])
        sample.note(0, states[:, 0])
        for layer in range(1, LAYERS):  # as many layers, but of other tokens
            sample.note(layer, states[:5, layer])
        assert sample.take() is None
        run_step(sample, states)
        assert len(sample.take()) == 4

    def test_what_was_taken_does_not_change_with_the_engine_s_buffer(self):
        sample, states = sample_of(LAYERS), draw_states(4)
        kept = states.clone()
        run_step(sample, states)
        states.zero_()
        assert torch.equal(sample.take(), kept)


class Ticking:
    """A clock that goes on by the next of some durations whenever it is read."""

    def __init__(self, note_s, between_s):
        self.now_s, self._next, self._durations = 0.0, 0, (note_s, between_s)

    def __call__(self):
        self.now_s += self._durations[(self._next + 1) % 2]
        self._next += 1
        return self.now_s


class TestSamplingTime:
    """A clock is read before and after each note, so that notes take what it says."""

    @pytest.mark.parametrize(("note_s", "left_out"), [(1e-6, 0), (1e-3, 990)])
    def test_notes_keep_to_their_share_of_the_steps(self, note_s, left_out):
        between_s, share, steps = 1e-2, 0.01, 1000
        sample = LiveSample(
            LAYERS, share=share, clock=Ticking(note_s, between_s), capacity_tokens=10**6
        )
        for _ in range(steps):
            run_step(sample, torch.zeros(4, LAYERS, HIDDEN))
        noted = steps - sample.saved_steps
        cost_s = noted * LAYERS * note_s
        assert noted > 0
        assert cost_s < share * steps * LAYERS * between_s + LAYERS * note_s
        assert (sample.saved_steps > 0) == (left_out > 0)

    def test_pauses_between_steps_earn_nothing(self):
        clock = Ticking(1e-3, 1e-3)
        sample = LiveSample(LAYERS, share=0.01, clock=clock)
        for _ in range(20):
            run_step(sample, torch.zeros(4, LAYERS, HIDDEN))
            clock.now_s += 1000.0
        assert sample.saved_steps == 19


class TestLearning:
    def test_a_better_predictor_is_put_in_place_after_enough_tokens(self):
        learning = LiveLearning(draw_gates(), 1, OPTIONS)
        copied = learning.predictor
        swaps = [learning.learn(draw_states(64, topic=2.0, seed=seed)) for seed in range(16)]
        first = next(number for number, swap in enumerate(swaps) if swap is not None)
        # 256 tokens are held out, and the first fit is made of 128.
        assert (first + 1) * 64 == 256 + 128
        swap = swaps[first]
        assert swap.fitted_tokens == pytest.approx(128, abs=1)
        assert swap.judged_tokens == 128
        assert swap.layers == LAYERS - 1
        assert swap.accuracy_after > swap.accuracy_before + 0.05
        assert learning.predictor is not copied
        assert learning.predictor.error(0).mean_at(64) < copied.error(0).mean_at(64)

    def test_it_predicts_better_than_the_copied_gates(self):
        gates = draw_gates()
        learning = LiveLearning(gates, 2, OPTIONS)
        copied = learning.predictor
        for seed in range(12):
            learning.learn(draw_states(64, topic=2.0, noise=0.1, seed=seed))
        fresh = draw_states(512, topic=2.0, noise=0.1, seed=99)
        true_E = torch.bincount(
            torch.topk(gates[2].logits(fresh[:, 2]), 2, dim=1).indices.ravel(), minlength=EXPERTS
        ).numpy()

        def misplaced(predictor):
            return abs(predictor.predict(0, fresh[:, 0]) - true_E).sum()

        assert misplaced(learning.predictor) < 0.5 * misplaced(copied)

    def test_nothing_is_replaced_where_nothing_is_to_be_won(self):
        learning = LiveLearning(draw_gates(), 1, OPTIONS)
        copied = learning.predictor
        every = tuple(range(LAYERS))  # all layers see the same: copied gates are exact
        for seed in range(12):
            assert learning.learn(draw_states(64, still=every, seed=seed)) is None
        assert learning.predictor is copied
        # How far off the copied gates are is known all the same.
        assert copied.error(0).mean_at(64) == pytest.approx(0.0, abs=1e-6)

    def test_it_follows_when_traffic_changes(self):
        learning = LiveLearning(draw_gates(), 1, OPTIONS)
        for seed in range(12):
            learning.learn(draw_states(64, topic=2.0, seed=seed))
        later = [
            learning.learn(draw_states(64, still=(1,), topic=2.0, seed=seed))
            for seed in range(100, 160)
        ]
        assert any(swap is not None for swap in later)

    def test_fits_become_rarer(self):
        fits = []
        learning = LiveLearning(draw_gates(), 1, OPTIONS)
        compare = learning._compare
        learning._compare = lambda ridge: fits.append(learning._fitted_tokens) or compare(ridge)
        for seed in range(40):
            learning.learn(draw_states(64, seed=seed))
        assert fits == [128, 192, 320, 512, 768, 1152, 1728, 2304][: len(fits)]
        assert len(fits) >= 7

    def test_tokens_with_nan_are_left_out(self):
        learning = LiveLearning(draw_gates(), 1, OPTIONS)
        swaps = []
        for seed in range(12):
            states = draw_states(65, topic=2.0, seed=seed)
            states[7, 2, 3] = float("nan" if seed % 2 else "inf")
            swaps.append(learning.learn(states))
        assert learning.skipped_tokens == 12
        assert any(swap is not None for swap in swaps)
        assert all(model.weight.isfinite().all() for model in learning.predictor.models)

    def test_where_memory_is_short_the_least_accurate_layers_are_learnt(self, caplog):
        sums_bytes = 8 * (HIDDEN + 1) * (HIDDEN + 1 + EXPERTS)
        learning = LiveLearning(
            draw_gates(), 1, replace(OPTIONS, max_sums_bytes=2 * sums_bytes - 1)
        )
        for seed in range(20):
            # Layers 1 and 3 are exact with copied gates; only layer 2 has something to learn.
            swap = learning.learn(draw_states(64, still=(1, 3), topic=2.0, seed=seed))
            if swap is not None:
                break
        assert swap is not None
        assert swap.layers == 1
        assert swap.predictor.models[1] is not learning._gates[2]
        assert "1 of 3 layers fit" in caplog.text

    def test_fewer_tokens_are_held_out_where_memory_is_short(self):
        few = replace(OPTIONS, max_held_out_bytes=100 * LAYERS * HIDDEN * 4)
        assert LiveLearning(draw_gates(), 1, OPTIONS).held_out_tokens == 256
        assert LiveLearning(draw_gates(), 1, few).held_out_tokens == 100

    def test_memory_does_not_grow(self):
        learning = LiveLearning(draw_gates(), 1, OPTIONS)
        for seed in range(50):
            learning.learn(draw_states(64, seed=seed))
            assert len(learning._newest.all_TLH) < 256 + 64

    @pytest.mark.parametrize(
        "options",
        [{"held_out_tokens": 1}, {"fit_growth": 1.0}, {"least_gain": -0.1}, {"max_sums_bytes": 0}],
    )
    def test_wrong_options_are_refused(self, options):
        with pytest.raises(ConfigError, match="out of range"):
            LiveOptions(**options)

    @pytest.mark.parametrize("distance", [0, LAYERS])
    def test_a_distance_that_no_layer_has_is_refused(self, distance):
        with pytest.raises(ConfigError, match="use 1 to 3"):
            LiveLearning(draw_gates(), distance)


class TestFirstLayers:
    """Layers that no gate sees ahead are learnt from embeddings."""

    @staticmethod
    def with_embeddings(states_TLH, *, meaningless=False):
        """The first layer's states, turned and of another length, as if they were embeddings."""
        embedding_TH = 3.0 * states_TLH[:, 0].roll(1, dims=-1)
        if meaningless:
            embedding_TH = torch.randn(
                embedding_TH.shape, generator=torch.Generator().manual_seed(len(states_TLH))
            )
        return torch.cat([states_TLH, embedding_TH[:, None]], dim=1)

    def learn(self, *, meaningless=False, gates=None, topic=1.0):
        learning = LiveLearning(gates or draw_gates(), 2, OPTIONS)
        assert learning.first_layers.predict(torch.zeros(3, HIDDEN)) == {}
        for seed in range(12):
            states = draw_states(64, topic=topic, seed=seed)
            learning.learn(self.with_embeddings(states, meaningless=meaningless))
        return learning.first_layers

    def test_their_loads_are_predicted_once_something_was_learnt(self):
        gates = draw_gates()
        first = self.learn(gates=gates)
        fresh = draw_states(512, topic=1.0, seed=99)
        expected = first.predict(self.with_embeddings(fresh)[:, -1])
        assert sorted(expected) == [0, 1]
        for layer, load_E in expected.items():
            true_E = torch.bincount(
                torch.topk(gates[layer].logits(fresh[:, layer]), 2, dim=1).indices.ravel(),
                minlength=EXPERTS,
            ).numpy()
            assert load_E.sum() == pytest.approx(1024, rel=1e-4)
            assert abs(load_E - true_E).sum() / 2 < 0.12 * 1024
            assert 0.0 < first.errors[layer].mean_at(64) < 0.3

    def test_they_can_be_learnt_alone(self):
        """Beside a trained predictor only the first d layers and the embedding are sampled."""
        gates = draw_gates()
        learning = FirstLayersLearning(gates[:2], OPTIONS)
        for seed in range(12):
            tokens = self.with_embeddings(draw_states(64, topic=1.0, seed=seed))
            learning.learn(torch.cat([tokens[:, :2], tokens[:, -1:]], dim=1))
        together = self.learn(gates=gates)
        embedding_TH = self.with_embeddings(draw_states(64, topic=1.0, seed=99))[:, -1]
        expected, alone = (
            first.predict(embedding_TH) for first in (together, learning.first_layers)
        )
        assert sorted(alone) == sorted(expected) == [0, 1]
        for layer, load_E in alone.items():
            assert load_E == pytest.approx(expected[layer])

    def test_embeddings_that_say_nothing_do_no_harm(self):
        first = self.learn(meaningless=True, topic=0.0)
        for error in first.errors.values():  # what chance leaves of 64 tokens
            assert error.mean_at(64) < 0.2
