"""Which rows are for training, for validation and for the test, always the same ones."""

from datasets import DatasetDict

SHARES = {"validation": 0.15, "test": 0.15}  # of a single table
HELD_OUT = 0.1  # of the training rows, where there is a test but no validation


def three_splits(splits: DatasetDict, label: str | None = None) -> DatasetDict:
    """train, validation and test, made of what was published; every draw is by seed 0.

    - All three are published: they stay.
    - train and test: a tenth of train is held out as validation, at most as many rows as the test has.
    - train and validation, or a test whose labels are hidden (missing, -1 or empty): the published validation is the
      test, since nothing may be chosen by it, and validation is held out of train as before.
    - train alone: one table is cut 70/15/15.

    Other splits (SVHN's `extra`) are left out.
    """
    splits = DatasetDict({name: splits[name] for name in ("train", "validation", "test") if name in splits})
    if "train" not in splits:
        raise ValueError("The data has no training split.")
    if "test" in splits and label is not None and hidden(splits["test"], label):
        del splits["test"]
    if len(splits) == 1:
        return cut_table(splits["train"])
    if "test" not in splits:
        splits["test"] = splits.pop("validation")
    if "validation" not in splits:
        rows = min(max(1, round(HELD_OUT * len(splits["train"]))), len(splits["test"]))
        both = splits["train"].train_test_split(test_size=rows, seed=0)
        splits["train"], splits["validation"] = both["train"], both["test"]
    return DatasetDict({name: splits[name] for name in ("train", "validation", "test")})


def cut_table(table) -> DatasetDict:
    sizes = {name: max(1, round(share * len(table))) for name, share in SHARES.items()}
    if len(table) < 3:
        raise ValueError(f"{len(table)} rows cannot be cut into train, validation and test.")
    first = table.train_test_split(test_size=sizes["test"], seed=0)
    second = first["train"].train_test_split(test_size=sizes["validation"], seed=0)
    return DatasetDict(train=second["train"], validation=second["test"], test=first["test"])


def hidden(split, label: str) -> bool:
    return label not in split.column_names or all(value in (-1, None, "", "-1") for value in split[label])
