"""A real pretrained model survives the patch: the bars that the README's numbers stand above."""

import pytest

from benchmarks.calibration import survival

BARS = {"AutoNorm, norm weight 0.9": 0.999, "Dynamic Tanh": 0.79, "affine-like linears": 0.85}


@pytest.mark.parametrize("name", BARS)
def test_sentence_embeddings_of_unseen_text(name, shared):
    row = survival(str(shared / "data" / "sst2_sentences"), texts=64, seed=0, names=[name], unseen=96, size=8)[name]
    assert row["bits that differ at strength 0"] == 0
    assert row["calibrated"] >= BARS[name] > row["uncalibrated"]
