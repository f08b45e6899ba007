"""The report of what the control loop was told and what replicas came of it."""

import numpy as np

from moeless.core.clock import ManualClock
from moeless.core.events import LoadTaken, ReplicasChanged
from moeless.functions.planning.load_report import LoadReport, devices_of_experts
from moeless.telemetry.memory import MemorySink


class Spec:
    model_id = "m"
    num_layers = 1


class Model:
    spec = Spec()

    def __init__(self):
        self.replicas_ED = np.eye(2, dtype=np.uint8)

    def planned_ED(self, layer):
        return self.replicas_ED.copy()


class Loop:
    adaptive = True

    def __init__(self, model):
        self.model = model
        self.errors = []

    def start(self):
        pass

    def observe(self, *, step, layer, load_E):
        pass

    def forecast(self, *, step, layer, load_E, expected_error=None):
        self.errors.append(expected_error)
        self.model.replicas_ED[0, 1] = load_E[0] > 5


def make():
    model, sink = Model(), MemorySink()
    loop = Loop(model)
    return LoadReport(loop, model=model, clock=ManualClock(), sink=sink), sink, loop


def test_loads_are_reported_before_and_changed_replicas_after_they_were_dealt_with():
    report, sink, loop = make()
    report.start()
    report.forecast(step=1, layer=0, load_E=np.array([9.0, 1.0]), expected_error=0.125)
    report.observe(step=1, layer=0, load_E=np.array([8.0, 2.0]))
    assert [type(event) for event in sink.events] == [
        ReplicasChanged,
        LoadTaken,
        ReplicasChanged,
        LoadTaken,
    ]
    assert [event.devices_E for event in sink.of(ReplicasChanged)] == [
        ((0,), (1,)),
        ((0, 1), (1,)),
    ]
    assert loop.errors == [0.125]
    assert [(e.kind, e.step, e.tokens) for e in sink.of(LoadTaken)] == [
        ("forecast", 1, 10.0),
        ("actual", 1, 10.0),
    ]


def test_replicas_that_stay_are_reported_once():
    report, sink, _ = make()
    report.start()
    report.forecast(step=1, layer=0, load_E=np.array([1.0, 1.0]))
    assert len(sink.of(ReplicasChanged)) == 1
    assert report.adaptive


def test_a_device_is_named_once_for_each_copy():
    copies_ED = np.array([[2, 1], [0, 0]], dtype=np.uint8)
    assert devices_of_experts(copies_ED) == ((0, 0, 1), ())
