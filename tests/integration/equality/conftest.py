"""Fixtures: what unmodified transformers answers, and the record of how tokens were split."""

import sys
from pathlib import Path

for _folder in (Path(__file__).resolve().parents[2], Path(__file__).resolve().parent):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

import pytest  # noqa: E402 - the path to the shared modules comes first
import torch  # noqa: E402
from equality_reference import make_reference  # noqa: E402

from moeless.policies.splitters.even import EvenSplitter  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def one_compute_thread():
    """Several devices share few cores here; more threads would only fight each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory):
    """The checkpoint of a family and what transformers answers with it; each is made once."""
    made = {}

    def reference_of(family):
        if family not in made:
            made[family] = make_reference(family, tmp_path_factory.mktemp("checkpoints"))
        return made[family]

    return reference_of


@pytest.fixture
def splits(monkeypatch):
    """Every split of the token path, as (tokens per expert [E], tokens per replica [E, D])."""
    record = []
    split = EvenSplitter.split

    def recorded(self, count_E, replicas_ED):
        share_ED = split(self, count_E, replicas_ED)
        record.append((count_E.copy(), share_ED.copy()))
        return share_ED

    monkeypatch.setattr(EvenSplitter, "split", recorded)
    return record
