"""`docs/errors.md` says what likely mistakes say; each of them says something, early and with its remedy."""

import re

import pytest

pytest.importorskip("peft")

from tests.docs import mistakes


@pytest.fixture(scope="module")
def written() -> str:
    return mistakes.page()


def test_the_page_has_the_real_messages(written):
    assert mistakes.PAGE.read_text(encoding="utf-8") == written, "write it anew: python -m tests.docs.mistakes"


def test_every_mistake_says_something(written):
    rows = re.findall(r"^\| (``.*``) \| (.*) \|$", written, flags=re.M)
    assert len(rows) == sum(map(len, mistakes.MISTAKES.values())) >= 20
    ours = r"`` (\w*Error|UserWarning|RuntimeError): .{20,}"
    assert [row for row in rows if not re.match(ours, row[1])] == []
    assert [row for row in rows if row[1].startswith(("`` TypeError", "`` KeyError", "`` AttributeError"))] == []
