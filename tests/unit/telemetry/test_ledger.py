"""The ledger says what the counters say, whatever happens in between."""

import os
import sqlite3
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeless.errors import ConfigError
from moeless.telemetry.ledger import KeyCounts, LedgerConfig, LedgerWriter
from moeless.telemetry.ledger.file import open_ledger
from moeless.telemetry.ledger.meter import PeriodCounter
from moeless.telemetry.ledger.usage import count_missing_minutes, read_usage
from moeless.telemetry.snapshot import GbSeconds, RuntimeSnapshot, Timing

LAYERS, EXPERTS = 2, 3
NOON = 1_800_000_000.0  # begins an hour


def snapshot(scale=1.0, tokens=None, warm=None):
    """Counters that have grown in proportion to ``scale``."""
    tokens = np.array([[1, 3, 0], [0, 0, 0]]) if tokens is None else tokens
    warm = np.ones((LAYERS, EXPERTS, 1), dtype=np.uint8) if warm is None else warm
    gb_s_L = {
        "billed": (0.4 * scale, 0.2 * scale),
        "resident": (3.0 * scale, 6.0 * scale),
        "reserved": (10.0 * scale, 10.0 * scale),
        "paper": (1.0 * scale, 1.0 * scale),
    }
    return RuntimeSnapshot(
        model="m",
        devices=("cpu:0",),
        steps=1,
        tokens_LE=tokens * round(scale),
        replicas_LED=warm,
        planned_LED=warm,
        device_tokens_LD=np.zeros((LAYERS, 1), dtype=np.int64),
        straggler_mean_L=np.ones(LAYERS),
        straggler_last_L=np.ones(LAYERS),
        warm_starts=round(5 * scale),
        cold_starts=round(4 * scale),
        cold_starts_L=np.zeros(LAYERS),
        warm_starts_L=np.zeros(LAYERS),
        blocking_loads=round(scale),
        evictions=0,
        plans=0,
        plans_early_share=1.0,
        replicas_warm_share=1.0,
        plan_s=Timing(),
        split_s=Timing(),
        prediction_accuracy_L=np.ones(LAYERS),
        instances_D={},
        resident_bytes_D=(0,),
        budget_bytes_D=(0,),
        gb_s=GbSeconds(**{name: sum(values) for name, values in gb_s_L.items()}),
        gb_s_L=gb_s_L,
        worker_restarts_D=(0,),
    )


class Server:
    """What a ledger follows."""

    def __init__(self, path, **config):
        self.keys = {}
        self.snapshot = snapshot(0.0)
        self.now_s = NOON
        self.clock_error_s = 0.0
        self.lost = 0
        self.path = path
        self.writer = LedgerWriter(
            LedgerConfig(path=path, **config),
            model="m",
            take_keys=lambda: self.keys,
            take_snapshot=lambda: self.snapshot,
            on_lost=self.lose,
            now_s=lambda: self.now_s + self.clock_error_s,
            monotonic_s=lambda: self.now_s - NOON + 5.0,
        )

    def lose(self):
        self.lost += 1

    def use(self, key, **counts):
        self.keys[key] = KeyCounts(**counts)

    def write(self, after_s=1.0):
        self.now_s += after_s
        self.writer.write()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "usage.db"


def usage(path, by, **when):
    connection = open_ledger(path, create=False)
    try:
        table = read_usage(connection, by=by, **when)
    finally:
        connection.close()
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_growth_is_counted_from_the_beginning_of_each_period():
    counter = PeriodCounter(60)
    values = [
        counter.take(np.array([v]), now)[0] for v, now in [(5, 10), (7, 59), (9, 61), (9, 70)]
    ]
    assert values == [5, 7, 2, 2]
    assert counter.period == 60


def test_a_counter_that_begins_anew_counts_on():
    counter = PeriodCounter(60)
    assert [counter.take(np.array([v]), 0)[0] for v in (5, 8, 2, 3)] == [5, 8, 10, 11]


def test_a_clock_that_is_set_back_opens_no_old_period():
    counter = PeriodCounter(60)
    counter.take(np.array([5]), 130)
    assert counter.take(np.array([6]), 10)[0] == 6
    assert counter.period == 120


def test_the_file_has_what_the_counters_say_and_only_its_owner_reads_it(path):
    server = Server(path)
    server.use("alice", requests=2, prompt_tokens=30, generated_tokens=7)
    server.use("bob")
    server.snapshot = snapshot(2.0)
    server.write()
    server.use("alice", requests=3, prompt_tokens=40, generated_tokens=9)
    server.write(after_s=100.0)
    assert usage(path, "key") == [
        {"model": "m", "key": "alice", "requests": 3, "prompt_tokens": 40, "generated_tokens": 9}
    ]
    (model,) = usage(path, "model")
    assert (model["requests"], model["cold_starts"], model["blocking_loads"]) == (3, 8, 2)
    assert model["billed_gb_s"] == pytest.approx(1.2)
    assert model["reserved_gb_s"] == pytest.approx(40.0)
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_functions_share_what_their_layers_used(path):
    server = Server(path)
    warm = np.array([[[1, 1], [1, 0], [0, 0]], [[0, 0]] * 3], dtype=np.uint8)
    server.snapshot = snapshot(1.0, warm=warm)
    server.write()
    server.snapshot = snapshot(4.0)
    server.write(after_s=3600.0)
    rows = usage(path, "function")
    assert [(row["layer"], row["expert"], row["tokens"]) for row in rows] == [
        *((0, 0, 4), (0, 1, 12), (0, 2, 0)),
        *((1, 0, 0), (1, 1, 0), (1, 2, 0)),
    ]
    first = rows[:3]
    assert [row["billed_gb_s"] for row in first] == pytest.approx([0.4, 1.2, 0.0])
    assert [row["resident_gb_s"] for row in first] == pytest.approx([2 + 3, 1 + 3, 3])
    for column, total in (("billed", 2.4), ("resident", 36.0), ("reserved", 80.0)):
        assert sum(row[f"{column}_gb_s"] for row in rows) == pytest.approx(total)


def test_writing_twice_is_the_same_as_once(path):
    server = Server(path)
    server.use("a", requests=1)
    server.snapshot = snapshot(1.0)
    for _ in range(5):
        server.write(after_s=0.1)
    assert usage(path, "key")[0]["requests"] == 1
    assert usage(path, "model")[0]["cold_starts"] == 4


def test_the_runs_of_several_servers_add_up(path):
    for requests in (2, 5):
        server = Server(path)
        server.use("a", requests=requests)
        server.write()
    assert usage(path, "key")[0]["requests"] == 7


def test_a_time_picks_whole_minutes(path):
    server = Server(path)
    for minute in range(4):
        server.use("a", requests=10 ** (minute + 1))
        server.write(after_s=1.0 if minute == 0 else 60.0)
    # In the minutes 0 to 3 there were 10, 90, 900 and 9000 requests.
    assert usage(path, "key", since_s=NOON + 60)[0]["requests"] == 9990
    assert usage(path, "key", since_s=NOON + 90)[0]["requests"] == 9990
    assert usage(path, "key", until_s=NOON + 60)[0]["requests"] == 10
    assert usage(path, "key", since_s=NOON + 3600) == []


def test_experts_that_do_not_answer_cost_nothing_that_was_counted(path):
    server = Server(path)
    server.snapshot = snapshot(1.0)
    server.write()
    server.snapshot = None
    server.use("a", requests=1)
    server.write(after_s=3600.0)
    server.snapshot = snapshot(1.0)  # a platform that began anew, and has got as far
    server.write()
    assert usage(path, "key")[0]["requests"] == 1
    assert usage(path, "model")[0]["cold_starts"] == 4
    server.snapshot = snapshot(0.5)
    server.write()
    assert usage(path, "model")[0]["billed_gb_s"] == pytest.approx(0.9)


def test_a_file_that_cannot_be_written_for_a_while_loses_nothing(path, caplog):
    server = Server(path)
    server.use("a", requests=1)
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        server.writer._connection.execute("PRAGMA busy_timeout = 1")
        server.write()
        server.use("a", requests=3)
        server.write(after_s=60.0)
        other.execute("ROLLBACK")
    other.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    server.use("a", requests=4)
    server.write(after_s=60.0)
    assert usage(path, "key")[0]["requests"] == 4
    assert usage(path, "key", until_s=NOON + 60)[0]["requests"] == 1
    assert caplog.records[-1].getMessage().endswith("again")


def test_old_periods_are_dropped(path):
    server = Server(path, keep_days=1)
    server.use("a", requests=1)
    server.snapshot = snapshot(1.0)
    server.write()
    server.use("a", requests=5)
    server.write(after_s=3 * 86400.0)
    assert usage(path, "key")[0]["requests"] == 4
    assert usage(path, "model")[0]["cold_starts"] == 0


DAY = 86400.0


def days_kept(path):
    connection = open_ledger(path, create=False)
    found = connection.execute("SELECT DISTINCT period_s FROM key_usage").fetchall()
    connection.close()
    return sorted((period_s - NOON) / DAY for (period_s,) in found)


@pytest.fixture
def long_used(path):
    """A year of usage, a minute a day."""
    server = Server(path)
    for day in range(365):
        server.use("a", requests=day + 1)
        server.write(after_s=0.0 if day == 0 else DAY)
    assert len(days_kept(path)) == 365
    return server


@pytest.mark.parametrize("jump_s", [410 * DAY, 4000 * DAY, -400 * DAY])
@pytest.mark.parametrize("for_s", [1.0, 300.0, 599.0])
def test_a_clock_that_is_wrong_for_a_moment_drops_nothing_and_misplaces_nothing(
    long_used, path, jump_s, for_s
):
    before = days_kept(path)
    long_used.clock_error_s = jump_s
    for requests in (1, 2, 3):
        long_used.use("a", requests=365 + requests)
        long_used.write(after_s=for_s / 3)
    long_used.clock_error_s = 0.0
    long_used.use("a", requests=369)
    long_used.write()
    assert set(before) <= set(days_kept(path))
    assert max(days_kept(path)) < 364.1
    assert usage(path, "key")[0]["requests"] == 369
    since = usage(path, "key", since_s=NOON + 364 * DAY + 60, until_s=NOON + 365 * DAY)
    assert sum(row["requests"] for row in since) <= 4


def test_a_clock_that_stays_wrong_costs_a_bounded_part_of_the_oldest_usage(long_used, path):
    long_used.clock_error_s = 4000 * DAY
    kept = len(days_kept(path))
    for _ in range(24):
        long_used.write(after_s=300.0)
    assert kept - len(days_kept(path)) <= 2 * 2
    long_used.clock_error_s = 0.0
    for requests in range(366, 371):
        long_used.use("a", requests=requests)
        long_used.write(after_s=300.0)
    days = [day for day in days_kept(path) if day < 1000]
    assert days[-1] == pytest.approx(364.1, abs=0.1), "a clock that was put right is followed"
    assert usage(path, "key", until_s=NOON + 400 * DAY)[0]["requests"] >= 370 - 5


@pytest.mark.parametrize("back_s", [30.0, 90.0, 3 * 3600.0, 30 * DAY])
def test_a_clock_that_is_set_back_replaces_nothing_that_was_written(path, back_s):
    server = Server(path)
    for requests in (10, 20, 30):
        server.use("a", requests=requests)
        server.snapshot = snapshot(requests / 10)
        server.write(after_s=60.0)
    server.clock_error_s = -back_s
    for requests in (31, 32, 33):
        server.use("a", requests=requests)
        server.write(after_s=400.0)
    assert usage(path, "key")[0]["requests"] == 33
    assert usage(path, "model")[0]["cold_starts"] == 12
    tokens = sum(row["tokens"] for row in usage(path, "function"))
    assert tokens == server.snapshot.tokens_LE.sum()


def test_a_shorter_retention_comes_true_in_steps(long_used, path):
    long_used.writer.close()
    server = Server(path, keep_days=30)
    server.now_s += 365 * DAY
    kept = []
    for _ in range(24 * 365):
        server.now_s += 3600.0
        server.writer._forget(server.now_s)
        kept.append(len(days_kept(path)))
        if kept[-1] == 0:
            break
    drops = [before - after for before, after in zip([365, *kept], kept, strict=False)]
    assert max(drops) <= 2
    assert sum(drops[:200]) >= 330, "a year within some days"


def test_usage_that_cannot_be_written_for_hours_is_told_counted_and_marked(path, caplog):
    server = Server(path)
    server.write()
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        server.writer._connection.execute("PRAGMA busy_timeout = 1")
        for minute in range(1, 131):
            server.use("a", requests=minute)
            server.write(after_s=60.0)
        other.execute("ROLLBACK")
    other.close()
    server.use("a", requests=131)
    server.write(after_s=60.0)
    written = usage(path, "key")[0]["requests"]
    assert (written, server.lost) == (131 - 11, 11)
    assert [r.levelname for r in caplog.records] == ["ERROR", "ERROR", "WARNING"]
    connection = open_ledger(path, create=False)
    assert count_missing_minutes(connection) == 11
    assert count_missing_minutes(connection, since_s=NOON + 12 * 60) == 0
    assert count_missing_minutes(connection, until_s=NOON + 60) == 0
    connection.close()


def test_a_ledger_of_an_older_release_has_no_gaps_and_gets_a_table_for_them(path):
    Server(path).writer.close()
    with sqlite3.connect(path) as older:
        older.execute("DROP TABLE gaps")
    older.close()
    for is_there in (False, True):
        connection = open_ledger(path, create=False)
        assert count_missing_minutes(connection) == 0
        connection.close()
        if not is_there:
            Server(path).write()


def test_an_end_in_peace_writes_the_last_usage(path):
    server = Server(path)
    server.writer.start()
    server.use("a", requests=9)
    server.writer.close()
    assert usage(path, "key")[0]["requests"] == 9


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "text").write_text("hello " * 1000)
    with sqlite3.connect(tmp_path / "other.db") as other:
        other.execute("CREATE TABLE t (x)")
    other.close()
    for name, message in (
        ("text", "cannot be used as a ledger"),
        ("other.db", "a database of something else"),
        ("none", "no such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_ledger(tmp_path / name, create=False)
    with pytest.raises(ConfigError, match="something else"):
        open_ledger(tmp_path / "other.db", create=True)
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_ledger(tmp_path / "missing" / "usage.db", create=True)


def test_a_ledger_of_a_later_release_is_refused(path):
    Server(path).writer.close()
    with sqlite3.connect(path) as changed:
        changed.execute("PRAGMA user_version = 9")
    changed.close()
    with pytest.raises(ConfigError, match="version 9"):
        open_ledger(path, create=False)


def test_a_model_of_another_shape_under_the_same_id_is_shown_beside(path):
    Server(path).write()
    server = Server(path)
    other = snapshot(
        1.0,
        tokens=np.ones((LAYERS, EXPERTS + 1), dtype=np.int64),
        warm=np.ones((LAYERS, EXPERTS + 1, 1), dtype=np.uint8),
    )
    server.snapshot = replace(other)
    server.write()
    assert len(usage(path, "function")) == LAYERS * (EXPERTS + EXPERTS + 1)


@pytest.mark.parametrize("what", ["text", "database"])
def test_a_file_of_something_else_is_left_as_it_is(tmp_path, what):
    path = tmp_path / "other"
    if what == "text":
        path.write_text("root:x:0:0\n" * 100)
    else:
        with sqlite3.connect(path) as other:
            other.execute("CREATE TABLE theirs (a)")
        other.close()
    path.chmod(0o644)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"cannot be used as a ledger|something else"):
        open_ledger(path, create=True)
    assert path.read_bytes() == before
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [each.name for each in tmp_path.iterdir()] == ["other"]


def test_a_ledger_is_a_file_and_no_device():
    with pytest.raises(ConfigError, match="no ordinary file"):
        open_ledger(Path(os.devnull), create=True)
