"""Local files read back as they were written; splits that are always the same."""

import pytest

pytest.importorskip("datasets")

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training import made_data
from training.data import find_column, load_splits, require_texts, three_splits, with_class_labels
from training.data.files import read_files, split_of
from training.data.idx import read_array
from training.data.treebank import ESCAPES, article_split, conllu_rows, tree_rows

WORD = st.text(st.characters(categories=("L", "N", "P", "S"), exclude_characters="()"), min_size=1, max_size=8)
WORD = WORD.filter(lambda word: "\\" not in word and not word.startswith("#") and word not in ESCAPES)
TAG = st.sampled_from(["NN", "VBZ", "-LRB-", "PRP$", "``", ","])
SENTENCE = st.lists(st.tuples(WORD, TAG), min_size=1, max_size=6)


# --- Formats --------------------------------------------------------------------------------------------------------


@given(sentences=st.lists(SENTENCE, min_size=1, max_size=4), data=st.data())
def test_trees_give_back_their_leaves(tmp_path_factory, sentences, data):
    """However deep the brackets are, and wherever empty leaves stand."""
    text = ""
    for sentence in sentences:
        pieces = []
        for word, tag in sentence:
            if data.draw(st.booleans()):
                pieces.append("(-NONE- *T*-1)")
            pieces.append(f"({tag} {word})")
        while len(pieces) > 1:  # brackets around a random run of neighbours
            start = data.draw(st.integers(0, len(pieces) - 2))
            stop = data.draw(st.integers(start + 2, len(pieces)))
            pieces[start:stop] = ["(NP-SBJ\n  " + " ".join(pieces[start:stop]) + ")"]
        text += f"\n( (S {pieces[0]}) )\n"
    file = tmp_path_factory.mktemp("trees") / "wsj_0001.mrg"
    file.write_text(text, encoding="utf-8")
    rows = list(tree_rows(file))
    assert rows == [{"tokens": [w for w, _ in s], "xpos": [t for _, t in s]} for s in sentences]


def test_penn_escapes_are_undone_and_broken_trees_refused(tmp_path):
    made_data.ptb_pos(tmp_path)
    first, second = tree_rows(tmp_path / "wsj_0001.mrg")
    assert first["tokens"] == ["Pierre", "Vinken", ",", "will", "join", "the", "board", "(", "61/2", ")", "."]
    assert first["xpos"] == ["NNP", "NNP", ",", "MD", "VB", "DT", "NN", "-LRB-", "CD", "-RRB-", "."]
    assert second["tokens"] == ["Mr.", "Vinken", "is", "chairman", "."]
    (tmp_path / "wsj_0001.mrg").write_text("( (S (NN dog) )")
    with pytest.raises(ValueError, match="wsj_0001.mrg has unbalanced brackets"):
        list(tree_rows(tmp_path / "wsj_0001.mrg"))


def test_wall_street_journal_splits(tmp_path):
    for section in range(25):
        (tmp_path / f"{section:02}").mkdir()
        (tmp_path / f"{section:02}" / f"wsj_{section:02}01.mrg").write_text(f"( (S (NN word{section}) ) )")
    splits = read_files(str(tmp_path))
    sections = {name: {int(row[0][4:]) for row in split["tokens"]} for name, split in splits.items()}
    assert sections == {"train": set(range(19)), "validation": {19, 20, 21}, "test": {22, 23, 24}}


def test_articles_of_nltks_sample_stay_together():
    names = [f"wsj_{i:04}" for i in range(1, 200)]
    counts = {split: sum(article_split(name) == split for name in names) for split in ("train", "validation", "test")}
    assert sum(counts.values()) == 199 and counts["train"] > 140 and min(counts.values()) >= 12


@given(sentences=st.lists(SENTENCE, min_size=1, max_size=4))
def test_conllu_gives_back_its_words(tmp_path_factory, sentences):
    lines = []
    for sentence in sentences:
        lines += ["# text = something", "1-2\tboth\t_\t_\t_\t_\t_\t_\t_\t_"]
        for index, (word, tag) in enumerate(sentence, 1):
            lines += [f"{index}\t{word}\t_\tX\t{tag}\t_\t_\t_\t_\t_", f"{index}.1\tempty\t_\tX\tNN\t_\t_\t_\t_\t_"]
        lines.append("")
    file = tmp_path_factory.mktemp("conllu") / "x-ud-train.conllu"
    file.write_text("\n".join(lines), encoding="utf-8", newline="")
    rows = list(conllu_rows(file))
    assert [row["tokens"] for row in rows] == [[w for w, _ in s] for s in sentences]
    assert [row["xpos"] for row in rows] == [[t for _, t in s] for s in sentences]
    assert [row["upos"] for row in rows] == [["X"] * len(s) for s in sentences]


@settings(max_examples=10)
@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=3), end=st.sampled_from(["", ".gz"]))
def test_idx_gives_back_its_array(tmp_path_factory, shape, end):
    values = made_data.pictures(shape[0], tuple(shape[1:]))
    file = tmp_path_factory.mktemp("idx") / f"train-images-idx3-ubyte{end}"
    made_data.write_idx(file, values)
    assert np.array_equal(read_array(file), values)


def test_images_come_back_bit_by_bit_from_every_format(tmp_path):
    for write, column, shape in (
        (made_data.mnist, "image", (28, 28)),
        (made_data.fashion_mnist, "image", (28, 28)),
        (made_data.svhn, "image", (32, 32, 3)),
        (made_data.cifar10, "img", (32, 32, 3)),
    ):
        folder = tmp_path / write.__name__
        folder.mkdir()
        write(folder)
        splits = read_files(str(folder))
        expected = {image.tobytes() for image in made_data.pictures(24, shape)}
        assert {np.asarray(image).tobytes() for image in splits["train"][column]} == expected, write.__name__
        assert len(splits["test"]) == 8 and isinstance(splits["test"].features["label"], ClassLabel)
    assert read_files(str(tmp_path / "mnist"))["train"]["label"][:12] == [*range(10), 0, 1]
    assert set(three_splits(read_files(str(tmp_path / "svhn")))) == {"train", "validation", "test"}  # no `extra`


def test_a_changed_file_is_read_again(tmp_path):
    made_data.pos_ewt(tmp_path)
    assert len(read_files(str(tmp_path))["train"]) == 24
    (tmp_path / "en_ewt-ud-train.conllu").write_text(made_data.CONLLU * 3)
    assert len(read_files(str(tmp_path))["train"]) == 3


def test_glue_sentences_keep_their_quotes(tmp_path):
    made_data.sst2(tmp_path)
    splits = read_files(str(tmp_path))
    assert splits["train"]["sentence"][1] == 'a "great film number 1 , not n/a'
    assert splits["train"]["label"][:2] == [0, 1] and set(splits) == {"train", "validation", "test"}


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        read_files(str(tmp_path / "nowhere"))
    (tmp_path / "notes.md").write_text("no data")
    with pytest.raises(ValueError, match="no file of a known kind .*idx.*xlsx"):
        read_files(str(tmp_path))
    made_data.write_idx(tmp_path / "train-images-idx3-ubyte", made_data.pictures(3, (2, 2)))
    with pytest.raises(ValueError, match="only one of train-images-idx3-ubyte"):
        read_files(str(tmp_path))
    content = (tmp_path / "train-images-idx3-ubyte").read_bytes()
    for wrong in (content[:-1], content + b"\0", b"\0\0\x0d" + content[3:], b"", content[:3]):
        (tmp_path / "broken").write_bytes(wrong)
        with pytest.raises(ValueError, match="not an idx file"):
            read_array(tmp_path / "broken")
    with pytest.raises(ValueError, match="--dataset_name"):
        load_splits(type("Args", (), {"data_dir": None, "dataset_name": None, "dataset_config": None}))


def test_hidden_files_are_no_data(tmp_path):
    """Notebooks keep copies of what they edited, macOS puts halves of files into zip archives, Excel locks."""
    (tmp_path / "train.csv").write_text("text,label\na,0\nb,1\n")
    for name in (".ipynb_checkpoints/train-checkpoint.csv", "__MACOSX/._train.csv", "~$train.csv"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text,label\nc,1\n")
    assert read_files(str(tmp_path))["train"]["text"][:] == ["a", "b"]


@pytest.mark.parametrize("name", ["train.csv", "test.csv", "my validation set.csv", "x-dev.conllu"])
def test_one_file_is_one_table_whatever_its_name_says(name, tmp_path):
    text = made_data.CONLLU * 9 if name.endswith("conllu") else "text,label\n" + "a,0\nb,1\n" * 9
    (tmp_path / name).write_text(text)
    splits = load_splits(type("Args", (), {"data_dir": str(tmp_path / name)}))
    assert list(splits) == ["train"] and len(three_splits(splits)["test"]) > 0


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("train.csv", b"", "No columns"),
        ("train.csv", b"text,label\ncaf\xe9,1\n", "utf-8"),
        ("x-train.conllu", b"1\ta\n\n", "x-train.conllu is no CoNLL-U: .* has 2 of its 10 fields"),
        ("wsj_0001.mrg", b"( (S (NN a) )", "unbalanced brackets"),
        ("test.csv", b"text,label\na,0\n", "no training split, only test"),
    ],
)
def test_why_a_file_cannot_be_read_is_said(name, content, words, tmp_path):
    """`datasets` says "An error occurred while generating the dataset"."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        load_splits(type("Args", (), {"data_dir": str(tmp_path)}))


def test_which_split_a_file_is_of(tmp_path):
    names = {
        "en_ewt-ud-dev.conllu": "validation",
        "train-00000-of-00002.parquet": "train",
        "validation/0000.parquet": "validation",
        "test/cat/train_station.png": "train",
        "test/cat/latest.png": "test",
        "t10k-images-idx3-ubyte.gz": "test",
        "contest.csv": "train",
        "extra-00000-of-00001.parquet": "extra",
    }
    assert {name: split_of(tmp_path / name, tmp_path) for name in names} == names


# --- Splits ---------------------------------------------------------------------------------------------------------


def table(start: int, stop: int, label: int | None = 0) -> Dataset:
    return Dataset.from_dict({"row": list(range(start, stop)), "label": [label] * (stop - start)})


@pytest.mark.parametrize(
    "published, sizes",
    [
        ({"train": (0, 100)}, (70, 15, 15)),
        ({"train": (0, 100), "test": (100, 150)}, (90, 10, 50)),
        ({"train": (0, 1000), "test": (1000, 1020)}, (980, 20, 20)),
        ({"train": (0, 100), "validation": (100, 120)}, (90, 10, 20)),
        ({"train": (0, 100), "validation": (100, 120), "test": (120, 150)}, (100, 20, 30)),
        ({"train": (0, 3)}, (1, 1, 1)),
    ],
)
def test_every_row_is_in_one_split_always_the_same(published, sizes):
    def rows() -> dict[str, list[int]]:
        splits = three_splits(DatasetDict({name: table(*span) for name, span in published.items()}), "label")
        return {name: list(split["row"]) for name, split in splits.items()}

    first = rows()
    assert tuple(map(len, first.values())) == sizes and list(first) == ["train", "validation", "test"]
    assert sorted(sum(first.values(), [])) == list(range(sum(sizes)))
    assert first == rows()


@pytest.mark.parametrize("label", [-1, None])
def test_a_test_without_labels_is_none(label):
    splits = {"train": table(0, 100), "validation": table(100, 120), "test": table(120, 150, label)}
    splits = three_splits(DatasetDict(splits), "label")
    assert list(splits["test"]["row"]) == list(range(100, 120)) and len(splits["validation"]) == 10


def test_splits_that_cannot_be_made():
    with pytest.raises(ValueError, match="no training split"):
        three_splits(DatasetDict(test=table(0, 5)))
    with pytest.raises(ValueError, match="2 rows cannot be cut"):
        three_splits(DatasetDict(train=table(0, 2)))


# --- Columns --------------------------------------------------------------------------------------------------------


def test_columns_by_name_or_by_kind():
    features = Features(text=Value("string"), kind=ClassLabel(names=["a", "b"]))
    splits = DatasetDict(train=Dataset.from_dict({"text": ["x"], "kind": [1]}, features=features))
    assert find_column(splits, "text", "text_column") == "text"
    assert find_column(splits, "label", "label_column", ClassLabel) == "kind"
    with pytest.raises(ValueError, match="no column 'label'; name one of text, kind by --label_column"):
        find_column(splits, "label", "label_column")


@pytest.mark.parametrize("values, names", [([3, 1, 3], ["1", "3"]), (["no", "yes", "no"], ["no", "yes"])])
def test_plain_labels_become_classes(values, names):
    splits = with_class_labels(DatasetDict(train=Dataset.from_dict({"label": values})), "label")
    feature = splits["train"].features["label"]
    assert feature.names == names
    assert [feature.int2str(index) for index in splits["train"]["label"]] == [str(value) for value in values]


NO_LABEL = "rows of train have nothing in the column 'label'"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1, 1, 1], "the same label"),
        ([0, None, 1], "1 " + NO_LABEL),
        (["good", None, None], "2 " + NO_LABEL),
        ([0.25, 0.5, 0.25], "fractions"),
        ([[0], [1], [0]], "one class a row"),
    ],
)
def test_labels_that_are_no_classes_are_refused(values, words):
    """Among them those that a model would learn without a complaint: one class alone is always right."""
    with pytest.raises(ValueError, match=words):
        with_class_labels(DatasetDict(train=Dataset.from_dict({"label": values})), "label")


def test_class_labels_are_held_to_the_same():
    for values, words in (([0, -1, 1], "1 " + NO_LABEL), ([1, 1, 1], "the same label")):
        rows = Dataset.from_dict({"label": values}, features=Features(label=ClassLabel(names=["a", "b"])))
        with pytest.raises(ValueError, match=words):
            with_class_labels(DatasetDict(train=rows), "label")
    splits = {"train": Dataset.from_dict({"label": [0, 1]}), "test": Dataset.from_dict({"label": ["0", "1"]})}
    with pytest.raises(ValueError, match="int64 in train, string in test"):
        with_class_labels(DatasetDict(splits), "label")


def test_a_text_column_holds_texts():
    require_texts(DatasetDict(train=Dataset.from_dict({"text": ["a", ""]})), "text")
    for values, words in ((["a", None], "1 rows of train have nothing"), ([1, 2], "int64")):
        with pytest.raises(ValueError, match=words):
            require_texts(DatasetDict(train=Dataset.from_dict({"text": values})), "text")
