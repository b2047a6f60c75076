"""Modules whose names transformers converts between file and model are left alone, and what is patched reloads."""

from hf_autonorm import plan
from tests.guarantees import check
from tests.zoo import Entry


def test_names_that_would_not_come_back_are_left_alone():
    entry = Entry("transformers", "molmo2_text", "base")
    model, _ = entry.build()
    rows = plan(model, linear="affine_like")
    converted = [row for row in rows if row.reason and "between file and model" in row.reason]
    assert converted and rows.patched
    assert check(entry.build, "norm+linear").failures == {}
