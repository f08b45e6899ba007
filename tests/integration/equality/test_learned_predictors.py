"""Predictors that were trained, or learn while they serve, change no output token."""

import json
import os
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from equality_reference import (
    assert_same_answers,
    assert_same_answers_until,
    replicas_shared_tokens,
    serving,
)

from effort import PATIENCE_S
from fakes.trained_predictors import train_predictor
from families import VOCABULARY
from moeless.bootstrap.serving import learning_thread, live_first_layers, live_predictor
from moeless.bootstrap.serving.learning_thread import LearningThread
from moeless.learned import first_layers_learning, live_learning
from moeless.learned.live_options import LiveOptions
from moeless.learned.live_sample import LiveSample

FAMILIES = ("deepseek_v3", "phimoe", "gpt_oss", "mixtral")
"""Each with another rule of choosing experts."""


@pytest.fixture(scope="module")
def train(reference_of, tmp_path_factory):
    """Train a predictor of a family's checkpoint; returns its directory. Each is made once."""
    made = {}

    def train(family, distance):
        if (family, distance) not in made:
            made[family, distance] = train_predictor(
                reference_of(family).directory,
                tmp_path_factory.mktemp(f"{family}-{distance}"),
                vocabulary=VOCABULARY,
                distance=distance,
            )
        return made[family, distance]

    return train


class EagerThread(LearningThread):
    """Learns without rests, and can be waited for."""

    def __init__(self, learn, *, share):
        super().__init__(self._learn_once, share=1.0)
        self._learn_all = learn
        self._rounds = 0
        self._round_ended = threading.Condition()

    def catch_up(self):
        """Wait until all that was noted until now has been learnt from."""
        with self._round_ended:
            # The round that is going on may have begun before.
            enough = self._rounds + 2
            assert self._round_ended.wait_for(lambda: self._rounds >= enough, timeout=PATIENCE_S)

    def _learn_once(self):
        self._learn_all()
        with self._round_ended:
            self._rounds += 1
            self._round_ended.notify_all()


@pytest.fixture
def catch_up(monkeypatch):
    """Whoever learns from live tokens does so after few of them; call it to wait for that.

    The thread that learns has the lowest priority and rests most of the time: on a busy machine
    hundreds of answers are given before it has learnt anything.
    """
    options = LiveOptions(
        held_out_tokens=128, first_fit_tokens=64, chunk_tokens=32, least_gain=1e-9
    )
    threads = []

    def make_thread(learn, *, share):
        threads.append(EagerThread(learn, share=share))
        return threads[-1]

    for module in (live_learning, first_layers_learning):
        monkeypatch.setattr(module, "LiveOptions", lambda: options)
    for module in (live_predictor, live_first_layers):
        monkeypatch.setattr(module, "LiveSample", partial(LiveSample, share=1.0))
        monkeypatch.setattr(module, "LearningThread", make_thread)
    monkeypatch.setattr(learning_thread, "_ROUND_S", 0.001)
    monkeypatch.setattr(os, "setpriority", lambda *_: None)

    def catch_up():
        for thread in threads:
            thread.catch_up()

    return catch_up


@pytest.mark.parametrize(
    ("family", "distance"), [*((name, 1) for name in FAMILIES), ("deepseek_v3", 2), ("phimoe", 2)]
)
def test_trained_predictors_give_the_answers_of_transformers(
    family, distance, train, reference_of, splits
):
    with serving(
        reference_of(family).directory,
        invoker="inline",
        devices=3,
        policy="paper",
        predictor=str(train(family, distance)),
    ) as served:
        assert_same_answers_until(
            served, reference_of(family), lambda: replicas_shared_tokens(served, splits)
        )
        snapshot = served.runtime.snapshot()
    assert (snapshot.predictor.kind, snapshot.predictor.distance) == ("trained", distance)
    assert snapshot.forecast_s.count > 0
    assert (snapshot.prediction_accuracy_L[distance:] > 0.5).all()


@pytest.mark.parametrize("family", ["deepseek_v3", "phimoe"])
def test_the_first_layers_are_learnt_beside_a_trained_predictor(
    family, train, reference_of, catch_up
):
    reference, predictor = reference_of(family), str(train(family, 2))
    hidden = json.loads((Path(predictor) / "manifest.json").read_text())["hidden"]
    with serving(
        reference.directory, invoker="inline", devices=2, policy="moeless", predictor=predictor
    ) as served:
        expect = served.runtime.look_ahead.on_path.forecast_first

        def is_expected():
            catch_up()
            return expect(torch.randn(4, hidden))

        assert_same_answers_until(served, reference, is_expected, attempts=50)
        assert_same_answers(served, reference)
        state = served.runtime.snapshot().predictor
    assert (state.kind, state.distance, state.swaps) == ("trained", 2, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_predictors_that_learn_and_are_replaced_give_the_answers_of_transformers(
    family, reference_of, catch_up
):
    reference, told = reference_of(family), []
    with serving(
        reference.directory,
        invoker="inline",
        devices=2,
        policy="moeless",
        predictor="auto",
        tell=told.append,
    ) as served:

        def is_replaced():
            catch_up()
            # This waits for plans, too: what is planned in time for a step is held against it.
            accuracy_L = served.runtime.snapshot().prediction_accuracy_L
            # Of the first layer nobody sees the gate input ahead; it is known before from what
            # it was.
            return served.runtime.look_ahead.state().swaps > 0 and not np.isnan(accuracy_L).any()

        assert_same_answers_until(served, reference, is_replaced, attempts=50)
        assert_same_answers(served, reference)
        snapshot = served.runtime.snapshot()
    assert snapshot.predictor.kind == "auto"
    assert len(told) >= snapshot.predictor.swaps > 0
    assert told[0].startswith("predictor replaced (1): ")


@pytest.mark.parametrize("predictor", ["gate", "previous", "ewma", "off"])
def test_accuracy_is_known_for_each_layer_whatever_predicts(predictor, reference_of):
    reference = reference_of("phimoe")
    with serving(
        reference.directory, invoker="inline", devices=2, policy="paper", predictor=predictor
    ) as served:

        def is_known():
            return not np.isnan(served.runtime.snapshot().prediction_accuracy_L).any()

        assert_same_answers_until(served, reference, is_known)
        state = served.runtime.snapshot().predictor
    looks_ahead = predictor == "gate"
    assert state.kind == ("previous" if predictor == "off" else predictor)
    assert state.distance == int(looks_ahead)
