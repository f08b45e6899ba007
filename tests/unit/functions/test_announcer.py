"""What the token path says of loads, and when it says nothing."""

import math

import numpy as np
import pytest
import torch

from moeless.core.model import ExpertShape, ModelSpec
from moeless.functions.links.board import Board
from moeless.functions.token_path.announcer import ExpectedLoad, LoadAnnouncer, LookAhead
from moeless.functions.token_path.token_path_stats import TokenPathStats

LAYERS, EXPERTS, DISTANCE = 4, 3, 1
COUNT_E = np.array([5, 2, 1])
X_TH = torch.ones(4, 2)


class Client:
    wants_loads = True

    def __init__(self):
        self.board = Board.in_process(num_layers=LAYERS, num_experts=EXPERTS, num_devices=1)
        self.rung = 0

    def announce_loads(self):
        self.rung += 1


class Watched:
    """A look-ahead predictor that remembers what it was asked."""

    def __init__(self):
        self.asked, self.noticed = [], []

    def forecast(self, layer, x_TH):
        self.asked.append(layer)
        return ExpectedLoad(COUNT_E * 2.0, 0.25)

    def first(self, embedding_TH):
        self.asked.append(-1)
        return {0: ExpectedLoad(COUNT_E * 3.0)}

    def on_path(self):
        return LookAhead(
            distance=DISTANCE,
            forecast=self.forecast,
            forecast_first=self.first,
            notice=lambda layer, _: self.noticed.append(layer),
        )


@pytest.fixture
def parts():
    client, predictor = Client(), Watched()
    return LoadAnnouncer(client, predictor.on_path(), stats=make_stats()), client, predictor


def make_stats():
    spec = ModelSpec(
        model_id="m",
        family="mixtral",
        num_experts=EXPERTS,
        top_k=2,
        layer_ids=tuple(range(LAYERS)),
        expert=ExpertShape(hidden=2, intermediate=2),
    )
    return TokenPathStats(spec, num_devices=1, function_bytes=1)


def run_step(announcer, step):
    announcer.announce_first(X_TH, step=step)
    for layer in range(LAYERS):
        announcer.take(layer, COUNT_E, X_TH, step=step)
        announcer.announce()
        announcer.announce()  # once is enough


def test_where_plans_follow_every_step_all_is_said_once(parts):
    announcer, client, predictor = parts
    for step in (1, 2):
        run_step(announcer, step)
        assert client.board.forecast_step_L.tolist() == [step] * LAYERS
        assert client.board.actual_step_L.tolist() == [step] * LAYERS
        client.board.plan_step_L[:] = step
    assert predictor.asked == [-1, 0, 1, 2] * 2
    assert client.rung == 2 * (1 + LAYERS)
    assert client.board.forecast_LE[0].tolist() == (COUNT_E * 3).tolist()
    assert client.board.forecast_LE[1].tolist() == (COUNT_E * 2).tolist()
    assert client.board.actual_LE.tolist() == [COUNT_E.tolist()] * LAYERS
    assert math.isnan(client.board.forecast_error_L[0])
    assert client.board.forecast_error_L[1] == 0.25


def test_while_plans_stand_nothing_is_predicted_said_or_rung(parts):
    announcer, client, predictor = parts
    client.board.plan_step_L[:] = 9
    for step in range(5, 9):
        run_step(announcer, step)
    assert client.rung == 0
    assert predictor.asked == []
    assert not client.board.forecast_step_L.any()
    assert not client.board.actual_step_L.any()


def test_whoever_learns_sees_every_layer_of_every_step_even_while_plans_stand(parts):
    announcer, client, predictor = parts
    client.board.plan_step_L[:] = 9
    run_step(announcer, 5)
    assert predictor.noticed == [-1, 0, 1, 2, 3]


def test_each_layer_is_predicted_again_in_the_first_step_that_its_plan_is_not_for(parts):
    announcer, client, predictor = parts
    client.board.plan_step_L[:] = [9, 9, 4, 9]
    run_step(announcer, 5)
    assert predictor.asked == [1]  # layer 1 looks at layer 2
    assert client.board.forecast_step_L.tolist() == [0, 0, 5, 0]
    assert client.board.actual_step_L.tolist() == [0, 0, 5, 0]


def test_the_last_step_of_a_plan_says_what_came_true_so_that_the_next_one_can_be_made(parts):
    announcer, client, predictor = parts
    client.board.plan_step_L[:] = [5, 9, 9, 9]
    run_step(announcer, 5)
    assert predictor.asked == []
    assert client.board.actual_step_L.tolist() == [5, 0, 0, 0]


def test_nothing_is_said_where_nobody_plans_by_loads(parts):
    announcer, client, predictor = parts
    client.wants_loads = False
    run_step(announcer, 1)
    assert (client.rung, predictor.asked, predictor.noticed) == (0, [], [])


def test_what_was_predicted_is_held_against_what_came_true():
    client, right, wrong = Client(), ExpectedLoad(COUNT_E), ExpectedLoad(np.array([0, 7, 1]))
    stats = make_stats()
    look_ahead = LookAhead(
        distance=DISTANCE, forecast=lambda layer, _: right if layer == 0 else wrong
    )
    run_step(LoadAnnouncer(client, look_ahead, stats=stats), 1)
    assert np.isnan(stats.accuracy_L[0])
    assert stats.accuracy_L[1:].tolist() == pytest.approx([1.0, 1 - 5 / 8, 1 - 5 / 8])
