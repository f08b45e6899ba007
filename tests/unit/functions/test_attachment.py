"""While recording, the supervisor sees an engine's position only when it looks."""

import socket

import numpy as np
import pytest

from fakes.replays import EXPERT
from moeless.core.model import ModelSpec
from moeless.functions.links import shared_memory
from moeless.functions.links.board import EngineBoard, ModelBoard
from moeless.functions.links.channel import ChannelShape
from moeless.functions.supervisor.attachment import Attachment

SHAPE = {"num_layers": 2, "num_experts": 3, "num_devices": 1}


@pytest.fixture(params=[True, False], ids=["recording", "not recording"])
def pair(request):
    """An attachment, and the board as the engine sees it."""
    ours, theirs = socket.socketpair()
    spec = ModelSpec(
        model_id="m",
        family="mixtral",
        layer_ids=(0, 1),
        num_experts=3,
        top_k=1,
        expert=EXPERT,
    )
    model_fd = shared_memory.create("test-model", ModelBoard.num_bytes(**SHAPE))
    attachment = Attachment(
        1,
        ours,
        spec=spec,
        shape=ChannelShape(
            max_rows=4, max_assignments=4, hidden=EXPERT.hidden, dtype="float32", num_experts=3
        ),
        num_devices=1,
        model_fd=model_fd,
        latched=request.param,
    )
    engine = EngineBoard(shared_memory.attach(attachment.engine_fds()[1]), **SHAPE)
    yield attachment, engine, request.param
    attachment.close()
    theirs.close()


def use(engine, layer, *experts, at_ns, step):
    used_ED = np.zeros((3, 1), dtype=np.bool_)
    used_ED[list(experts)] = True
    engine.post_used(layer, used_ED, at_ns=at_ns, step=step)


def test_a_layer_that_the_engine_goes_on_to_is_seen_with_the_next_look(pair):
    attachment, engine, latched = pair
    engine.step[0], engine.layer[0] = 3, 0
    position = attachment.look()
    assert (position.step, position.layer) == (3, 0)
    engine.layer[0] = 1
    assert attachment.board.layer[0] == (0 if latched else 1)
    assert attachment.look().layer == attachment.board.layer[0] == 1


def test_what_was_used_is_seen_with_the_next_look_and_said_once(pair):
    attachment, engine, latched = pair
    use(engine, 1, 0, 2, at_ns=7, step=1)
    assert attachment.board.used_ns_LED[1].ravel().tolist() == ([0] * 3 if latched else [7, 0, 7])
    assert attachment.look().used == (((1, 1),) if latched else ())
    assert attachment.board.used_ns_LED[1].ravel().tolist() == [7, 0, 7]
    use(engine, 1, 1, at_ns=8, step=2)
    use(engine, 0, 1, at_ns=9, step=3)
    assert attachment.look().used == (((0, 3), (1, 2)) if latched else ())
    assert attachment.look().used == ()
    assert attachment.board.used_ns_LED[1].ravel().tolist() == [7, 8, 7]


def test_a_layer_whose_use_is_being_written_is_seen_later(pair):
    attachment, engine, latched = pair
    use(engine, 0, 0, at_ns=7, step=1)
    engine.used_step_L[0] = 0
    assert attachment.look().used == ()
    engine.used_step_L[0] = 1
    assert attachment.look().used == (((0, 1),) if latched else ())
