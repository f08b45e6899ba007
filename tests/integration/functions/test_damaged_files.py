"""A checkpoint that is damaged while it is served: clear errors, no crash, and recovery."""

import os
import shutil
import signal

import pytest

from moeless.errors import UnavailableError

pytestmark = pytest.mark.slow

NAME = "model.safetensors"


@pytest.fixture(scope="module")
def damaged(serve, reference, tmp_path_factory):
    """A served copy of the checkpoint, with room for one layer: loads never end."""
    directory = shutil.copytree(reference[0], tmp_path_factory.mktemp("damaged") / "checkpoint")
    return serve(directory, slots=4), directory / NAME


def truncate(path, content):
    path.write_bytes(content[: len(content) // 2])


def corrupt(path, content):
    """Other values under an unchanged header."""
    header = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:header] + bytes(255 - b for b in content[header:]))


def swap(path, _content):
    """A file that is no checkpoint."""
    path.unlink()
    path.write_bytes(b"something else altogether" * 100)


def hide(path, _content):
    path.unlink()


@pytest.mark.parametrize("damage", [truncate, corrupt, swap, hide])
def test_a_damaged_shard_fails_the_model_with_a_reason_until_it_is_repaired(
    damage, damaged, tokens_of, expected
):
    served, path = damaged
    content = path.read_bytes()
    assert tokens_of(served.model) == expected
    damage(path, content)
    for _ in range(2):
        with pytest.raises(UnavailableError, match=r"layer \d, expert \d: .*(shard|changed)"):
            tokens_of(served.model)
    path.write_bytes(content)
    assert tokens_of(served.model) == expected
    report = served.client.report()
    assert report["worker_restarts"] == [0, 0]
    assert sum(report["failed_loads_D"]) > 0


def test_workers_that_start_while_the_checkpoint_is_gone_serve_it_once_it_is_back(
    damaged, tokens_of, expected, wait_until
):
    served, path = damaged
    elsewhere = path.parent.parent / "elsewhere"
    path.parent.rename(elsewhere)
    before = served.client.report()["worker_restarts"]
    for pid in served.worker_pids():
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: served.client.report()["worker_restarts"] == [n + 1 for n in before])
    wait_until(lambda: all(served.worker_pids()))
    with pytest.raises(UnavailableError, match="is not a directory"):
        tokens_of(served.model)
    elsewhere.rename(path.parent)
    wait_until(lambda: served.client.board.device_up_D.all())
    assert tokens_of(served.model) == expected
    assert served.client.report()["worker_restarts"] == [n + 1 for n in before]
