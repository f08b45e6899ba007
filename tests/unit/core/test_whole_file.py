"""Output files appear whole or not at all, and nothing but a file is ever replaced."""

import os
import stat
import threading

import pytest

from moeless.core.whole_file import written_whole


def write(path, text="new"):
    with written_whole(path) as part:
        part.write_text(text)


def test_a_file_is_replaced_only_when_it_has_been_written(tmp_path):
    path = tmp_path / "ü 你.json"
    path.write_text("old")

    def fail_halfway():
        with written_whole(path) as part:
            part.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert path.read_text() == "old"
    write(path)
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_what_it_points_to_is_written(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    for text in ("first", "second"):
        write(link, text)
        assert link.is_symlink()
        assert target.read_text() == text


def test_links_that_go_round_in_circles_are_an_error(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(OSError, match="symbolic links"):
        write(link)
    assert link.is_symlink()


def test_a_directory_is_an_error(tmp_path):
    with pytest.raises(IsADirectoryError):
        write(tmp_path)


def test_a_pipe_is_written_to_and_stays(tmp_path):
    pipe, heard = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()))
    reader.start()
    write(pipe)
    reader.join()
    assert heard == ["new"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
