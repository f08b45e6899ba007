"""A worker process without a supervisor and an engine: a test plays both."""

import time

import numpy as np
import torch

from effort import PATIENCE_S
from moeless.functions.links import shared_memory
from moeless.functions.links.channel import ChannelShape, Mailbox, await_answer, new_doorbell, ring
from moeless.functions.links.messages import close_all, receive, send
from moeless.functions.links.payload import Payload
from moeless.functions.links.segment_status import NOT_WARM, OK
from moeless.functions.links.wire import layout_to_json, spec_to_json
from moeless.functions.supervisor.config import WorkerConfig
from moeless.functions.supervisor.worker_launch import launch_worker


class DrivenWorker:
    """A worker on one CPU device that knows one model; ends with the block that it is used in.

    Args:
        loaded: The model.
        rows: The most rows of an invocation.
    """

    def __init__(self, loaded, *, rows):
        self._loaded = loaded
        spec = loaded.spec
        shape = ChannelShape(
            max_rows=rows,
            max_assignments=rows * spec.num_experts,
            hidden=spec.expert.hidden,
            dtype=spec.expert.dtype,
            num_experts=spec.num_experts,
        )
        fds = [
            shared_memory.create("payload", shape.payload_bytes),
            shared_memory.create("mailbox", shape.mailbox_bytes),
            new_doorbell(),
            new_doorbell(),
        ]
        self._payload = Payload(shared_memory.attach(fds[0]), shape)
        self._mailbox = Mailbox(shared_memory.attach(fds[1]), shape)
        self._fds, self._shape = fds, shape
        generator = torch.Generator().manual_seed(0)
        self._payload.x_TH[:] = torch.randn(self._payload.x_TH.shape, generator=generator)
        self._launch = launch_worker(WorkerConfig(torch_device="cpu", budget_bytes=1 << 40))
        self._launch.connection.settimeout(PATIENCE_S)
        self._warm = {}

    def __enter__(self):
        assert self._answer()["op"] == "ready"
        spec, layout = self._loaded.spec, self._loaded.layout
        introduction = {"spec": spec_to_json(spec), "layout": layout_to_json(layout)}
        introduction |= {"directory": str(self._loaded.directory), "model": spec.model_id}
        self._order("model", **introduction)
        assert "function_bytes" in self._answer()
        shape = self._shape.to_json()
        self._order("attach", fds=self._fds, engine=1, model=spec.model_id, shape=shape)
        assert self._answer()["op"] == "attached"
        return self

    def __exit__(self, *_):
        self._launch.kill()
        close_all(self._fds)

    @property
    def pid(self):
        return self._launch.process.pid

    def load(self, experts, *, meanwhile=None):
        """Load experts of the first layer; returns those that are warm then.

        Args:
            experts: Which.
            meanwhile: Called again and again until the worker has answered.
        """
        for expert in experts:
            self._order("load", functions=[self._function(expert)], digests=[None])
        open_orders, warm = len(experts), []
        while open_orders:
            if meanwhile is not None:
                meanwhile()
                self._launch.connection.setblocking(False)
            try:
                answer = self._answer()
            except BlockingIOError:
                continue
            finally:
                self._launch.connection.settimeout(PATIENCE_S)
            open_orders -= 1
            if answer["op"] == "loaded":
                warm += [function[2] for function in answer["functions"]]
            else:
                assert "cannot hold" in answer["reason"], answer["reason"]
        return warm

    def evict(self, experts):
        for expert in experts:
            self._order("evict", function=self._function(expert), reason="test")
        for _ in experts:
            assert self._answer()["op"] == "evicted"

    def invoke(self, experts, *, rows):
        """Have experts of the first layer compute the first rows; the output of warm ones."""
        self._payload.token_S[: rows * len(experts)] = torch.arange(rows).repeat(len(experts))
        segments_n3 = [(e, i * rows, (i + 1) * rows) for i, e in enumerate(experts)]
        segments_n3 = np.array(segments_n3, dtype=np.int32)
        seq = self._mailbox.post(layer=0, rows=rows, segments_n3=segments_n3)
        ring(self._fds[2])
        deadline_s = time.monotonic() + PATIENCE_S
        while not await_answer(self._mailbox, seq, self._fds[3], spin_s=0.0, timeout_s=0.5):
            assert self._launch.process.poll() is None, self._launch.describe_end()
            assert time.monotonic() < deadline_s, "it does not answer"
        status_n = self._mailbox.status_n[: len(experts)].tolist()
        assert set(status_n) <= {OK, NOT_WARM}
        return {
            expert: self._payload.y_SH[start:stop].clone()
            for (expert, start, stop), status in zip(segments_n3.tolist(), status_n, strict=True)
            if status == OK
        }

    def _function(self, expert):
        return (self._loaded.spec.model_id, 0, expert)

    def _order(self, op, *, fds=(), **fields):
        send(self._launch.connection, {"op": op, **fields}, fds=fds)

    def _answer(self):
        received = receive(self._launch.connection)
        assert received is not None, self._launch.describe_end()
        message, fds = received
        close_all(fds)
        return message
