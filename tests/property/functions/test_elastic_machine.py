"""A platform whose budgets change, and whose devices leave and join, while everything goes on."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from test_platform_machine import BYTES, EXPERTS, LAYERS, PlatformMachine

from effort import drawn
from moeless.functions.pool.lifecycle import State


class ElasticMachine(PlatformMachine):
    """Budgets change, but never so that those that are up hold less than one layer needs."""

    @initialize()
    def forget(self):
        self.held_before = {}

    @rule(data=st.data())
    def change_budget(self, data):
        device = data.draw(st.integers(0, len(self.slots) - 1))
        others = sum(self.slots[d] for d in self.hosts if d != device)
        slots = data.draw(st.integers(max(0, EXPERTS - others), EXPERTS * LAYERS + 1))
        self.slots[device] = slots
        self.platform.set_budget(device, slots * BYTES)
        self.note()
        if slots == 0:
            assert not self.board.planned_LED[:, :, device].any()
            assert device not in self.platform.in_use

    @rule(data=st.data())
    def let_hosts_finish(self, data):
        """Nobody holds more than its budget in the end, unless loads elsewhere fail."""
        super().let_hosts_finish(data)
        for pool in self.platform.pools:
            held = [i.function for i in pool.instances()]
            if pool.held_bytes > pool.budget_bytes:
                assert set(held) & self.failed_lately()

    def failed_lately(self):
        return {function for function, _ in self.platform._retries._failures}

    @invariant()
    def no_budget_is_exceeded(self):
        """Except by what was held when it was made smaller, which only becomes less."""
        for pool in self.platform.pools:
            instances = list(pool.instances())
            held = sum(i.num_bytes for i in instances)
            assert pool.held_bytes == held
            assert held <= max(pool.budget_bytes, self.held_before.get(pool.device, 0))
            self.held_before[pool.device] = held
            draining = sum(i.num_bytes for i in instances if i.state is State.DRAINING)
            assert pool.free_bytes == pool.budget_bytes - held + draining

    @invariant()
    def what_stays_beyond_a_budget_is_on_its_way_elsewhere(self):
        for pool in self.platform.pools:
            if pool.budget_bytes or pool.device not in self.hosts:
                continue
            others = [p for p in self.platform.pools if p is not pool]
            for instance in pool.instances():
                function = instance.function
                if instance.state is State.WARM and function not in self.failed_lately():
                    coming = [
                        p.wants(function) or p.state(function) is State.LOADING for p in others
                    ]
                    assert any(coming), instance


TestElasticMachine = ElasticMachine.TestCase
TestElasticMachine.settings = drawn(120, steps=40)
