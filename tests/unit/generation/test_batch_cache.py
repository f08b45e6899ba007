"""Rows of the batch cache hold their own tokens whatever joins, leaves, grows or moves."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import strategies as st  # noqa: E402
from hypothesis.stateful import (  # noqa: E402
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from effort import drawn  # noqa: E402
from moeless.engines.transformers.generation.batch_cache import BatchCache  # noqa: E402

# Layers differ in heads, and keys differ from values in size, as in latent attention.
LAYER_SHAPES = [((2, 3), (2, 5)), ((1, 4), (1, 2))]
MAX_LENGTH = 24


def states(tags, positions, heads, size):
    """[row, head, column, dim] whose every number names its sequence and position."""
    tag = torch.tensor(tags, dtype=torch.float64)[:, None] * 1000
    grid = tag + torch.as_tensor(positions, dtype=torch.float64)
    return grid[:, None, :, None].expand(-1, heads, -1, size)


def write(cache, tags, positions):
    """Do what a model does in one forward; return what attention would see."""
    seen = []
    for layer, ((key_heads, key_size), (value_heads, value_size)) in enumerate(LAYER_SHAPES):
        keys = states(tags, positions, key_heads, key_size)
        values = -states(tags, positions, value_heads, value_size)
        seen.append(cache.update(keys, values, layer))
    return seen


def prefilled(tag, length, chunk=5):
    cache = BatchCache.for_prefill(length)
    for start in range(0, length, chunk):
        positions = list(range(start, min(start + chunk, length)))
        cache.reserve(len(positions))
        write(cache, [tag], [positions])
        cache.commit(len(positions))
    return cache


class BatchCacheMachine(RuleBasedStateMachine):
    @initialize(
        rows=st.integers(1, 5), first_rows=st.integers(1, 5), columns=st.integers(1, MAX_LENGTH)
    )
    def start(self, rows, first_rows, columns):
        self.max_rows = rows
        self.cache = BatchCache(
            max_rows=rows, max_length=MAX_LENGTH, rows=first_rows, columns=columns
        )
        self.rows = []
        self.next_tag = 1

    @precondition(lambda self: len(self.rows) < self.max_rows)
    @rule(length=st.integers(1, MAX_LENGTH - 1))
    def join(self, length):
        assert self.cache.append_row(prefilled(self.next_tag, length)) == len(self.rows)
        self.rows.append([self.next_tag, length])
        self.next_tag += 1

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), scrub=st.booleans())
    def leave(self, data, scrub):
        row = data.draw(st.integers(0, len(self.rows) - 1))
        self.cache.remove_row(row, scrub=scrub)
        self.rows[row] = self.rows[-1]
        self.rows.pop()

    @precondition(lambda self: self.rows and max(n for _, n in self.rows) < MAX_LENGTH)
    @rule(alone=st.booleans())
    def decode(self, alone):
        self.cache.reserve(1)
        tags = [tag for tag, _ in self.rows]
        lengths = [length for _, length in self.rows]
        assert self.cache.position_ids(1).tolist() == [[length] for length in lengths]
        if alone:
            for row, (tag, length) in enumerate(self.rows):
                with self.cache.only_row(row):
                    assert self.cache.attention_mask(1) is None
                    assert self.cache.position_ids(1).tolist() == [[length]]
                    self.check(write(self.cache, [tag], [[length]]), [(tag, length + 1)])
        else:
            seen = write(self.cache, tags, [[length] for length in lengths])
            self.check(seen, [(tag, length + 1) for tag, length in self.rows])
        self.cache.commit(1)
        for row in self.rows:
            row[1] += 1

    @invariant()
    def lengths_and_masks_fit_the_rows(self):
        if not getattr(self, "rows", None):
            return
        lengths = [length for _, length in self.rows]
        assert self.cache.lengths == lengths
        assert self.cache.width == self.cache.get_seq_length() == max(lengths)
        mask = self.cache.attention_mask(1)
        if mask is None:
            assert min(lengths) == max(lengths)
        else:
            assert mask.sum(dim=1).tolist() == [length + 1 for length in lengths]
            assert bool((mask.diff(dim=1) >= 0).all())
        rows, columns = self.cache.capacity
        assert rows <= self.max_rows
        assert columns <= MAX_LENGTH + MAX_LENGTH // 8 + 64

    @staticmethod
    def check(seen, rows):
        width = max(length for _, length in rows)
        for keys, values in seen:
            assert keys.shape[2] == values.shape[2] == width
            for row, (tag, length) in enumerate(rows):
                expected = tag * 1000.0 + torch.arange(length, dtype=torch.float64)
                for found in (keys[row], -values[row]):
                    own = found[:, width - length :]
                    assert torch.equal(own, expected[None, :, None].expand_as(own))


TestBatchCache = BatchCacheMachine.TestCase
TestBatchCache.settings = drawn(60, steps=40)


def test_buffers_are_small_until_they_are_needed_and_small_again_when_all_have_left():
    cache = BatchCache(max_rows=16, max_length=2048)
    first = cache.capacity
    for tag in range(6):
        cache.append_row(prefilled(tag, 300, chunk=300))
    assert cache.capacity[0] == 8
    assert 300 < cache.capacity[1] < 2048
    for _ in range(6):
        cache.remove_row(0)
    assert cache.capacity == first


def test_the_window_narrows_when_the_longest_row_leaves():
    cache = BatchCache(max_rows=4, max_length=64)
    cache.append_row(prefilled(1, 40))
    cache.append_row(prefilled(2, 3))
    assert cache.width == 40
    cache.remove_row(0)
    assert cache.width == 3
    assert cache.attention_mask(1) is None


def test_a_full_batch_takes_no_further_row():
    cache = BatchCache(max_rows=1, max_length=8)
    cache.append_row(prefilled(1, 2))
    with pytest.raises(ValueError, match="1 rows at the most"):
        cache.append_row(prefilled(2, 2))


def test_scrubbed_rows_leave_no_nan_behind():
    cache = BatchCache(max_rows=4, max_length=64)
    broken = prefilled(1, 9)
    for layer in broken.layers:
        layer.values.fill_(float("nan"))
    cache.append_row(broken)
    cache.append_row(prefilled(2, 3))
    cache.append_row(prefilled(3, 9))
    cache.remove_row(0, scrub=True)
    cache.reserve(1)
    for keys, values in write(cache, [3, 2], [[9], [3]]):
        assert bool(keys.isfinite().all())
        assert bool(values.isfinite().all())


def test_a_cache_that_cannot_grow_stays_as_it_was(monkeypatch):
    cache = BatchCache(max_rows=4, max_length=64, rows=1, columns=8)
    cache.append_row(prefilled(1, 5))
    before = cache.capacity
    calls = []

    def refuse(*_args, **_keywords):
        calls.append(1)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", refuse)
        with pytest.raises(MemoryError):
            cache.append_row(prefilled(2, 5))
    assert calls
    assert cache.capacity == before
    assert cache.lengths == [5]
    cache.reserve(1)
    BatchCacheMachine.check(write(cache, [1], [[5]]), [(1, 6)])
