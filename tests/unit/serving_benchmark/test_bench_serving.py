"""The serving benchmark's own judgement: ratios within rounds, exact counts, nothing left."""

import asyncio
import csv
import os
import socket
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

SERVER = """
    import json, sys, time
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

    MADE = int(sys.argv[1])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply("application/json", json.dumps({"data": [{"id": "m", "object": "model"}]}))

        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert asked["ignore_eos"] and asked["temperature"] == 0
            base = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
            made = min(MADE, asked["max_tokens"])
            chunks = [
                base | {"choices": [{"index": 0, "delta": {"content": "a"}}]} for _ in range(made)
            ]
            usage = {"prompt_tokens": 1, "completion_tokens": made, "total_tokens": made + 1}
            chunks.append(base | {"choices": [], "usage": usage})
            lines = [f"data: {json.dumps(chunk)}\\n\\n" for chunk in chunks]
            self.reply("text/event-stream", "".join(lines) + "data: [DONE]\\n\\n")

        def reply(self, kind, text):
            self.send_response(200)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    port = int(sys.argv[sys.argv.index("--port") + 1])
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def bench(monkeypatch):
    """The benchmark, which lies beside the package."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import bench_serving

    yield bench_serving
    for name in ("bench_serving", "provenance"):
        sys.modules.pop(name, None)


@pytest.fixture
def fake_server(tmp_path):
    """The command of a server that makes at most so many tokens."""
    path = tmp_path / "server.py"
    path.write_text(textwrap.dedent(SERVER))
    return lambda made: [sys.executable, str(path), str(made)]


def sample(bench, number, kind, tokens_per_s, **changes):
    given = {"dtype": "float32", "streams": 1, "ttft_s": 0.1, "tpot_s": 0.02, "load": 0.0}
    given |= {"round": number, "kind": kind, "tokens": 100, "seconds": 100 / tokens_per_s}
    return bench.Sample(**given | changes)


def test_a_ratio_is_the_median_of_ratios_within_rounds_not_the_ratio_of_medians(bench):
    # The machine is twice as slow in the second round and four times in the third.
    ours, theirs = [30.0, 10.0, 6.0], [20.0, 10.0, 5.0]
    samples = [sample(bench, n, "ours", v) for n, v in enumerate(ours)]
    samples += [sample(bench, n, "theirs", v) for n, v in enumerate(theirs)]
    mine, reference = bench.summarise(samples, reference="theirs")
    assert mine.ratio == pytest.approx((1.2, 1.0, 1.5))
    assert mine.tokens_per_s == pytest.approx((10.0, 6.0, 30.0))
    assert reference.ratio == pytest.approx((1.0, 1.0, 1.0))


def test_ratios_compare_the_same_dtype_and_streams_only(bench):
    samples = [
        sample(bench, 0, "ours", 10.0),
        sample(bench, 0, "ours", 90.0, streams=16),
        sample(bench, 0, "ours", 7.0, dtype="bfloat16"),
        sample(bench, 0, "theirs", 20.0),
        sample(bench, 0, "theirs", 60.0, streams=16),
    ]
    rows = {(r.kind, r.dtype, r.streams): r for r in bench.summarise(samples, reference="theirs")}
    assert rows["ours", "float32", 1].ratio == pytest.approx((0.5, 0.5, 0.5))
    assert rows["ours", "float32", 16].ratio == pytest.approx((1.5, 1.5, 1.5))
    assert rows["ours", "bfloat16", 1].ratio is None
    table = bench.to_table(list(rows.values()), reference="theirs")
    assert "| ours | bfloat16 | 1 | 7.0 (7.0 … 7.0) | — | 0.100 | 20.0 |" in table
    assert "| ours | float32 | 16 | 90.0 (90.0 … 90.0) | 1.50 (1.50 … 1.50) |" in table


def test_a_round_without_the_reference_counts_for_speed_only(bench):
    samples = [sample(bench, 0, "ours", 10.0), sample(bench, 0, "theirs", 5.0)]
    samples.append(sample(bench, 1, "ours", 20.0))  # interrupted after it
    mine, _ = bench.summarise(samples, reference="theirs")
    assert mine.ratio == pytest.approx((2.0, 2.0, 2.0))
    assert mine.tokens_per_s[2] == pytest.approx(20.0)


def test_servers_take_turns_and_everything_is_written_down(
    bench, fake_server, tmp_path, monkeypatch
):
    running = []

    def command(machine, dtype):
        found = [p for p in psutil.Process().children() if str(tmp_path) in " ".join(p.cmdline())]
        running.append(len(found))
        return fake_server(99)

    monkeypatch.setattr(bench, "KINDS", {"ours": command, "theirs": command})
    line = "--kinds ours theirs --reference theirs --rounds 2 --tokens 4 --dtypes float32"
    line += f" --streams 1 3 --waves 2 --out {tmp_path}"
    args = bench.parse(line.split())
    machine = bench.Machine(model=tmp_path, threads=1, vllm_python=None, batch=3)
    samples = bench.run_rounds(args, machine, tmp_path / "log")
    assert running == [0] * 4, "never two at once"
    assert [(s.round, s.kind) for s in samples[::2]] == [
        (0, "ours"),
        (0, "theirs"),
        (1, "theirs"),
        (1, "ours"),
    ]
    assert [s.tokens for s in samples] == [8, 24] * 4
    with (tmp_path / "rounds.csv").open() as file:
        assert file.readline().startswith("# measured; command: ")
        rows = list(csv.DictReader(file))
    assert [int(row["tokens"]) for row in rows] == [8, 24] * 4
    assert "| theirs | float32 | 3 |" in (tmp_path / "summary.md").read_text()


def test_an_answer_of_another_length_ends_the_comparison(bench, fake_server, tmp_path):
    async def ask(url):
        async with bench.Client(url) as client:
            await client.ask_all(["hello"], 4)

    with bench.serving(fake_server(3), dict(os.environ), tmp_path / "log") as (url, _):
        with pytest.raises(SystemExit, match="3 tokens came where 4 were asked for"):
            asyncio.run(ask(url))
        assert answers(url)
    assert not answers(url)


def test_a_server_is_ended_with_its_children_when_an_error_comes(bench, fake_server, tmp_path):
    # As vLLM's: the process that was started only waits for the one that serves.
    server = fake_server(9)
    script = "import subprocess, sys; subprocess.run(sys.argv[1:])"
    command = [sys.executable, "-c", script, *server]
    family = []

    def interrupt():
        with bench.serving(command, dict(os.environ), tmp_path / "log"):
            family.extend(psutil.Process().children(recursive=True))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert len(family) >= 2
    assert psutil.wait_procs(family, timeout=60)[1] == []


def test_a_server_that_does_not_start_is_told_with_its_log(bench, tmp_path):
    with (
        pytest.raises(
            SystemExit, match=r"exit code 3 before it was ready; .*log has what it said"
        ),
        bench.serving([sys.executable, "-c", "raise SystemExit(3)"], {}, tmp_path / "log"),
    ):
        pass


def test_without_an_environment_of_vllm_only_our_servers_run(bench, capsys):
    args = bench.parse([])
    assert not set(args.kinds) & set(bench.VLLM_KINDS)
    assert args.reference == "inline"
    assert "only our own servers are run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench.parse(["--kinds", "vllm"])


def answers(url):
    host, port = url.removeprefix("http://").split(":")
    with socket.socket() as probe:
        return probe.connect_ex((host, int(port))) == 0
