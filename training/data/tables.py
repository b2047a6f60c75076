"""Tables of numbers in formats that `datasets` does not read."""

import gzip
from pathlib import Path

import numpy as np
from datasets import Dataset

STATLIB = ("Longitude", "Latitude", "HouseAge", "Rooms", "Bedrms", "Population", "Households", "MedInc", "HouseVal")


def read_xlsx(file: Path) -> Dataset:
    """The first sheet, its first row the names; empty rows and columns (UCI's file ends in some) are left out."""
    import pandas

    frame = pandas.read_excel(file)
    frame = frame.loc[:, [not str(name).startswith("Unnamed") or frame[name].notna().any() for name in frame]]
    return Dataset.from_pandas(frame.dropna(how="all"), preserve_index=False)


def read_statlib(file: Path) -> Dataset:
    """`cal_housing.data`: nine columns without names, a block of houses a row.

    Given as scikit-learn and the Hub's copies give it: rooms, bedrooms and population per household, the median value
    (`MedHouseVal`) in units of 100,000 dollars.
    """
    with (gzip.open if file.suffix == ".gz" else open)(file, "rt") as lines:
        values = np.loadtxt(lines, delimiter=",", ndmin=2)
    if values.shape[1] != len(STATLIB):
        raise ValueError(f"{file} has {values.shape[1]} columns, not the {len(STATLIB)} of StatLib's houses.")
    columns = dict(zip(STATLIB, values.T))
    households = columns["Households"]
    return Dataset.from_dict(
        {
            "MedInc": columns["MedInc"],
            "HouseAge": columns["HouseAge"],
            "AveRooms": columns["Rooms"] / households,
            "AveBedrms": columns["Bedrms"] / households,
            "Population": columns["Population"],
            "AveOccup": columns["Population"] / households,
            "Latitude": columns["Latitude"],
            "Longitude": columns["Longitude"],
            "MedHouseVal": columns["HouseVal"] / 100_000.0,
        }
    )
