import pytest

from moeless.errors import ConfigError
from moeless_experiments.context import Context


def test_what_several_experiments_need_is_made_once(tmp_path):
    made = []
    context = Context(out=tmp_path, cache=tmp_path)
    for _ in range(2):
        assert context.share("key", lambda: made.append(1) or "thing") == "thing"
    assert made == [1]


def test_missing_data_is_named_with_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match=r"routing/x\.npz.*MOELESS_DATA_DIR, which is not set"):
        Context(out=tmp_path, cache=tmp_path).require_data("routing/x.npz")
    with pytest.raises(ConfigError, match=r"has no routing/x\.npz"):
        Context(out=tmp_path, cache=tmp_path, data=tmp_path).require_data("routing/x.npz")
