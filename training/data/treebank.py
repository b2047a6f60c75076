"""Tagged sentences out of treebanks: CoNLL-U files (Universal Dependencies), bracketed trees (Penn Treebank)."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from datasets import DatasetDict, Features, List, Value

from training.data.stamps import cached_rows

STRINGS = List(Value("string"))
LEAF = re.compile(r"\(\s*([^\s()]+)\s+([^\s()]+)\s*\)")
# The Penn Treebank's own escapes, since a tokenizer should see what was printed in the newspaper.
ESCAPES = {"-LRB-": "(", "-RRB-": ")", "-LCB-": "{", "-RCB-": "}", "-LSB-": "[", "-RSB-": "]"}
WSJ = {"train": range(0, 19), "validation": range(19, 22), "test": range(22, 25)}


def read_conllu(files: list[Path], root: Path) -> DatasetDict:
    """`tokens`, `upos`, `xpos`: one row a sentence; the splits by the files' names (`en_ewt-ud-dev.conllu`)."""
    from training.data.files import split_of

    grouped = {}
    for file in files:
        grouped.setdefault(split_of(file, root), []).append(file)
    features = Features(tokens=STRINGS, upos=STRINGS, xpos=STRINGS)
    return DatasetDict({name: cached_rows(conllu_rows, members, features) for name, members in grouped.items()})


def conllu_rows(*files: Path) -> Iterator[dict]:
    """Syntactic words only: neither the surface form of a contraction (`8-9`) nor an empty node (`8.1`)."""
    words = []
    for file, line in ((f, line) for f in files for line in [*f.read_text(encoding="utf-8").split("\n"), ""]):
        fields = line.rstrip("\r").split("\t")
        if fields[0].isdecimal():
            if len(fields) < 5:
                raise ValueError(f"{file} is no CoNLL-U: {line!r} has {len(fields)} of its 10 fields between tabs.")
            words.append((fields[1], fields[3], fields[4]))
        elif fields == [""] and words:  # an empty line ends a sentence
            tokens, upos, xpos = map(list, zip(*words))
            yield {"tokens": tokens, "upos": upos, "xpos": xpos}
            words = []


def read_trees(files: list[Path], root: Path) -> DatasetDict:
    """`tokens` and `xpos` of the trees' leaves.

    With sections 00 to 24 of the Wall Street Journal (in the files' names, `wsj_0203.mrg`) the usual splits: 00-18,
    19-21, 22-24. Otherwise, as for NLTK's sample of 199 articles, 80/10/10 by a hash of the article's name: sentences
    of one article share names and phrases.
    """
    sections = {file: re.fullmatch(r"wsj_(\d\d)\d\d", file.stem) for file in files}
    whole = {int(match[1]) for match in sections.values() if match} >= set(range(25))
    grouped = {}
    for file, match in sections.items():
        if not whole:
            name = article_split(file.stem)
        elif match is None:
            continue
        else:
            name = next(name for name, members in WSJ.items() if int(match[1]) in members)
        grouped.setdefault(name, []).append(file)
    features = Features(tokens=STRINGS, xpos=STRINGS)
    return DatasetDict({name: cached_rows(tree_rows, members, features) for name, members in grouped.items()})


def article_split(name: str) -> str:
    share = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16) / 16**8
    return "train" if share < 0.8 else "validation" if share < 0.9 else "test"


def tree_rows(*files: Path) -> Iterator[dict]:
    """One row a tree; traces and other empty leaves (tag `-NONE-`) are left out."""
    for file in files:
        yield from trees_of(file)


def trees_of(file: Path) -> Iterator[dict]:
    depth, tree = 0, ""
    for piece in re.findall(r"[()]|[^()]+", file.read_text(encoding="utf-8")):
        depth += {"(": 1, ")": -1}.get(piece, 0)
        tree += piece
        if depth == 0:
            leaves = [(tag, word) for tag, word in LEAF.findall(tree) if tag != "-NONE-"]
            tree = ""
            if leaves:
                yield {"tokens": [unescaped(word) for _, word in leaves], "xpos": [tag for tag, _ in leaves]}
    if depth != 0:
        raise ValueError(f"{file} has unbalanced brackets.")


def unescaped(word: str) -> str:
    return ESCAPES.get(word, re.sub(r"\\([/*])", r"\1", word))
