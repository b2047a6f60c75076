"""The guarantees of a patch on a stratified sample of all architectures; `make sweep` asks them of every one."""

import pytest

from tests.guarantees import check
from tests.zoo import sample

ENTRIES = sample(36)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_norms(entry):
    verdict = check(entry.build, "norm")
    assert verdict.failures == {}


@pytest.mark.parametrize("entry", ENTRIES[::3], ids=str)
def test_norms_and_linears(entry):
    verdict = check(entry.build, "norm+linear")
    assert verdict.failures == {}


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e.name in ("test_convnext", "test_resnet", "wav2vec2")], ids=str
)
def test_convolutions(entry):
    verdict = check(entry.build, "conv")
    assert verdict.failures == {} and verdict.patched > 0
