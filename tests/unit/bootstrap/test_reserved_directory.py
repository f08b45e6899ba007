import pytest

from moeless.bootstrap.reserved_directory import reserved_directory
from moeless.errors import ConfigError


def fail(path, *, leave=None):
    with reserved_directory(path):
        if leave:
            (path / leave).touch()
        raise KeyboardInterrupt


def test_what_was_made_is_taken_away_when_the_work_fails(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "new" / "deeper")
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_before_stays(tmp_path):
    (tmp_path / "old").mkdir()
    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "old" / "new")
    assert [path.name for path in tmp_path.rglob("*")] == ["old"]
    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "old")
    assert (tmp_path / "old").is_dir()


def test_what_has_been_written_stays(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fail(tmp_path / "new", leave="part")
    assert (tmp_path / "new" / "part").exists()


def test_success_keeps_the_directory(tmp_path):
    with reserved_directory(tmp_path / "new"):
        pass
    assert (tmp_path / "new").is_dir()


def test_a_file_is_refused_in_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out .*file is a file; name a directory"):
        fail(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"cannot be made .*choose another"):
        fail(tmp_path / "file" / "below")
