"""A failure or a kill at any moment of a save leaves the old folder or the new one."""

import builtins
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from hf_autonorm import from_pretrained, patch, save_pretrained
from hf_autonorm.hub import atomic
from tests.hub.small import same_state, tiny_bert, tiny_net


class Broken:
    """Counts the file operations below a folder and makes the n-th one fail."""

    def __init__(self, monkeypatch, root: Path) -> None:
        self.count, self.fail_at, self.root = 0, None, str(root)
        for owner, name in (
            (os, "rename"), (os, "replace"), (os, "link"), (os, "mkdir"), (os, "symlink"), (os, "chmod"),
            (builtins, "open"), (Path, "write_text"), (Path, "write_bytes"), (shutil, "copyfile"),
        ):  # fmt: skip
            monkeypatch.setattr(owner, name, self.wrap(getattr(owner, name)))
        exchange = atomic._exchange
        monkeypatch.setattr(atomic, "_exchange", self.wrap(exchange))

    def wrap(self, original):
        def operation(*args, **kwargs):
            if any(str(a).startswith(self.root) for a in args if isinstance(a, (str, Path))):
                self.count += 1
                if self.count == self.fail_at:
                    raise OSError("no space left on device")
            return original(*args, **kwargs)

        return operation


@pytest.mark.parametrize("exchange", [True, False])
def test_failure_at_every_file_operation(tmp_path, monkeypatch, exchange):
    folder = tmp_path / "parent" / "net"
    old, new = patch(tiny_net(0)), patch(tiny_net(1), norm="dyt")
    save_pretrained(old, folder, metrics={"accuracy": 1})
    (folder / "mine.txt").write_text("mine")
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}
    with monkeypatch.context() as patcher:
        if not exchange:
            patcher.setattr(atomic, "_exchange", lambda a, b: False)
        broken = Broken(patcher, tmp_path)
        for step in range(1, 200):
            broken.count, broken.fail_at = 0, step
            try:
                save_pretrained(new, folder, metrics={"accuracy": 2})
                if broken.count < step:
                    break  # no operation was left to fail
                # The failing operation had a way around it (a link that became a copy): the new model is in place.
                broken.fail_at = None
                assert same_state(new, from_pretrained(folder, model=tiny_net(5)))
                save_pretrained(old, folder, metrics={"accuracy": 1})
            except OSError:
                broken.fail_at = None
                assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before, step
                assert os.listdir(tmp_path / "parent") == ["net"], step
    assert step > 8
    assert same_state(new, from_pretrained(folder, model=tiny_net(5)))
    assert "| accuracy | 2 |" in (folder / "README.md").read_text() and (folder / "mine.txt").read_text() == "mine"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_9_at_random_moments(tmp_path):
    """30 kills of a process that saves one model after the other: always one of them, whole."""
    folder = tmp_path / "net"
    models = [patch(tiny_net(seed)) for seed in range(2)]
    save_pretrained(models[0], folder, card=False)
    (folder / "mine.txt").write_text("mine")
    draw = random.Random(0)
    for _ in range(30):
        child = os.fork()
        if child == 0:
            try:
                for turn in range(1000):
                    save_pretrained(models[turn % 2], folder, card=False)
            finally:
                os._exit(0)
        time.sleep(draw.uniform(0.002, 0.1))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = from_pretrained(folder, model=tiny_net(5))
        assert any(same_state(found, model) for model in models)
        assert (folder / "mine.txt").read_text() == "mine"
    save_pretrained(models[0], folder, card=False)
    assert os.listdir(tmp_path) == ["net"]  # what the kills left behind is swept


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_kill_9_while_a_transformers_model_is_saved(tmp_path):
    """Two patches, one file and several shards in turn, with cards: the stock door finds one of the two models, whole,
    and the card beside it is that model's."""
    folder = tmp_path / "bert"
    models = [tiny_bert(0, norm="dyt"), tiny_bert(1, norm=None, linear="norm_like", strength=0.5)]
    options = [{"metrics": {"accuracy": 0.25}}, {"metrics": {"accuracy": 0.75}, "max_shard_size": "20KB"}]
    start = time.monotonic()
    save_pretrained(models[1], folder, **options[1])
    duration = time.monotonic() - start
    draw, seen = random.Random(1), [0, 0]
    for _ in range(30):
        child = os.fork()
        if child == 0:
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # progress bars
                for turn in range(1000):
                    save_pretrained(models[turn % 2], folder, **options[turn % 2])
            finally:
                os._exit(0)
        time.sleep(draw.uniform(0, 3 * duration))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        found = AutoModelForSequenceClassification.from_pretrained(folder)
        (which,) = [n for n, model in enumerate(models) if same_state(found, model)]
        seen[which] += 1
        readme = (folder / "README.md").read_text()
        assert f"| accuracy | {options[which]['metrics']['accuracy']} |" in readme
        assert (folder / "model.safetensors.index.json").exists() == (which == 1)
    assert min(seen) > 0, "the kills never came while the other model lay there"


def test_old_folder_is_found_after_a_kill_between_two_renames(tmp_path, monkeypatch):
    """File systems without an atomic exchange."""
    folder = tmp_path / "net"
    model = patch(tiny_net())
    save_pretrained(model, folder)
    os.rename(folder, atomic._beside(folder, "old"))
    assert same_state(from_pretrained(folder, model=tiny_net(5)), model)
    assert os.listdir(tmp_path) == ["net"]
