"""The ledger of a real server equals its counters, whoever is killed."""

import signal
import threading

import httpx
import psutil
import pytest

from effort import PATIENCE_S, wait_until
from moeless.telemetry.ledger.file import open_ledger
from moeless.telemetry.ledger.usage import read_usage
from moeless.telemetry.ledger.writer import unix_now_s

pytestmark = pytest.mark.slow

BODY = {"model": "tiny-granite", "prompt": "Hello", "max_tokens": 8, "ignore_eos": True}
COUNTS = ("cold_starts", "warm_starts", "blocking_loads", "evictions")


def read(path, by="model"):
    connection = open_ledger(path, create=False)
    try:
        table = read_usage(connection, by=by)
    finally:
        connection.close()
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def last_write_s(path):
    connection = open_ledger(path, create=False)
    ((seen_s,),) = connection.execute("SELECT seen_s FROM runs").fetchall()
    connection.close()
    return seen_s


@pytest.fixture
def served(model_dir, start_serving, tmp_path):
    path = tmp_path / "usage.db"
    keys = tmp_path / "keys"
    keys.write_text("alice:a\nbob:b\n")
    keys.chmod(0o600)
    server = start_serving(
        model_dir,
        *("--dtype", "float32", "--max-model-len", "64"),
        *("--ledger", str(path), "--api-key-file", str(keys)),
    )
    return server, path


def ask(server, key="a"):
    headers = {"authorization": f"Bearer {key}"}
    httpx.post(f"{server.url}/v1/completions", json=BODY, headers=headers, timeout=PATIENCE_S)


def counters(server):
    headers = {"authorization": "Bearer a"}
    found = httpx.get(f"{server.url}/moeless/experts", headers=headers, timeout=PATIENCE_S).json()
    return {name: found[name] for name in COUNTS} | {
        f"{name}_gb_s": value for name, value in found["gb_s"].items()
    }


def test_after_the_engine_is_killed_the_ledger_has_all_but_the_last_second(served):
    server, path = served
    for key in "aab":
        ask(server, key)
    wait_until(lambda: sum(row["generated_tokens"] for row in read(path, "key")) == 24)

    looks, stop = [(0.0, counters(server))], threading.Event()

    def go_on():
        while not stop.is_set():
            ask(server)
            look = counters(server)
            looks.append((unix_now_s(), look))  # the time at which it was surely counted

    busy = threading.Thread(target=go_on)
    busy.start()
    seen = {row["key"]: row["requests"] for row in read(path, "key")}
    wait_until(lambda: len(looks) > 3 and read(path, "key")[0]["requests"] > seen["alice"] + 1)
    stop.set()
    busy.join(PATIENCE_S)
    server.process.send_signal(signal.SIGKILL)
    server.process.wait()

    (model,) = read(path)
    seen_s = last_write_s(path)
    assert seen_s > looks[1][0]
    for at_s, look in looks:
        for name, value in look.items():
            assert at_s > seen_s or value <= model[name] + 1e-9, "counted before the last write"
    assert all(model[name] <= value + 1e-9 for name, value in looks[-1][1].items())
    alice, bob = read(path, "key")
    assert (bob["requests"], bob["generated_tokens"]) == (1, 8)
    assert alice["requests"] >= seen["alice"] + 2
    functions = read(path, "function")
    for name in ("billed_gb_s", "resident_gb_s", "reserved_gb_s"):
        assert sum(row[name] for row in functions) == pytest.approx(model[name], rel=1e-9)
    assert sum(row["tokens"] for row in functions) > 0


def test_after_a_worker_is_killed_and_the_server_ends_ledger_and_counters_are_equal(served):
    server, path = served
    ask(server)
    worker = next(p for p in server.family if "functions.worker" in " ".join(p.cmdline()))
    worker.kill()
    psutil.wait_procs([worker], timeout=PATIENCE_S)
    ask(server, "b")
    last = counters(server)
    warm_starts = [last["warm_starts"]]
    wait_until(lambda: [row["warm_starts"] for row in read(path)] == warm_starts)
    assert server.stop() == 0
    (model,) = read(path)
    assert {name: model[name] for name in ("warm_starts", "blocking_loads", "evictions")} == {
        name: last[name] for name in ("warm_starts", "blocking_loads", "evictions")
    }
    assert model["billed_gb_s"] == pytest.approx(last["billed_gb_s"])
    assert model["requests"] == 2
    assert model["generated_tokens"] == 16
