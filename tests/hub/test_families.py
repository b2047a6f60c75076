"""The proof of sharing: models of many families, pushed, and loaded in a fresh process with an empty cache."""

import json
import sys

from tests.hub.families import FAMILIES, push
from tests.hub.local_hub import LocalHub


def test_every_family_comes_back_bit_for_bit_through_every_door(tmp_path, monkeypatch):
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # no picture of the gates: it takes longer than all the rest
    script = "import runpy, sys; sys.argv[0] = 'families'; runpy.run_module('tests.hub.families', run_name='__main__')"
    with LocalHub(tmp_path / "hub") as hub:
        with monkeypatch.context() as patches:
            hub.take_over(patches, tmp_path / "home")
            push(work)
        assert len(hub.repositories) == len(FAMILIES) >= 12
        loaded = hub.run(script, tmp_path / "empty cache", work)
        assert loaded.returncode == 0, loaded.stderr[-3000:]
    results = json.loads(loaded.stdout.splitlines()[-1])
    assert len(results) == sum(len(family.doors) for family in FAMILIES)
    assert {name: words for name, words in results.items() if words != "equal"} == {}
