"""A pool's directory lets in its owner only, and says in a line what is wrong with another."""

import os
import socket
import stat

import pytest

from moeless.errors import ConfigError
from moeless.functions.supervisor.pool_directory import (
    find_directory,
    make_directory,
    possible_bases,
    private_directory,
)


@pytest.fixture
def listening(tmp_path, monkeypatch):
    """A directory in which somebody listens; named relatively, since sockets' paths are short."""
    monkeypatch.chdir(tmp_path)
    directory = make_directory(tmp_path / "pool")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("pool/supervisor.sock")
        yield directory


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_a_directory_is_made_for_its_owner_only(tmp_path):
    directory = make_directory(tmp_path / "pool")
    assert mode(directory.path) == 0o700
    assert make_directory(tmp_path / "pool") == directory


def test_a_private_directory_is_new_and_for_its_owner_only(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if len(os.fsencode(tmp_path)) > 70:
        monkeypatch.delenv("XDG_RUNTIME_DIR")
    one, other = private_directory(), private_directory()
    assert one != other
    assert mode(one.path) == 0o700
    for directory in (one, other):
        directory.remove()
        assert not directory.path.exists()


def test_a_pool_that_is_served_is_found(listening):
    assert find_directory(listening.path) == listening


@pytest.mark.parametrize("find", [make_directory, find_directory])
def test_a_directory_that_others_may_enter_is_refused(find, listening):
    listening.path.chmod(0o750)
    with pytest.raises(
        ConfigError, match=r"others may enter it \(mode 0750\); name .*/moe, or chmod 700"
    ):
        find(listening.path)


@pytest.mark.parametrize("find", [make_directory, find_directory])
def test_a_directory_of_somebody_else_is_refused(find, listening, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    with pytest.raises(ConfigError, match=r"not to you .user 4321.; use a pool of your own"):
        find(listening.path)


def test_where_no_pool_is_one_is_told_how_to_start_it(tmp_path):
    with pytest.raises(ConfigError, match=r"no pool is there; start one with: moeless pool serve"):
        find_directory(tmp_path / "nowhere")


def test_a_file_is_no_directory_and_a_path_too_long_for_sockets_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file: .*name another"):
        make_directory(tmp_path / "file")
    with pytest.raises(ConfigError, match="at most 91 bytes"):
        make_directory(tmp_path / ("x" * 110))


def test_without_a_folder_for_temporary_files_the_others_are_tried(tmp_path, monkeypatch):
    def none_can_be_written():
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none_can_be_written)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert possible_bases() == [str(tmp_path), "/tmp"]
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR to one that you can write to"):
        private_directory()
