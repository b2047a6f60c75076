"""What all tests share: offline, one thread, repeatable, and a way to the shared data."""

import gc
import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))  # `from tests.models import …`, however pytest was started

torch.set_num_threads(1)
settings.register_profile(
    "repeatable", deadline=None, derandomize=True, max_examples=25, suppress_health_check=list(HealthCheck)
)
settings.load_profile("repeatable")


def pytest_collection_finish(session: pytest.Session) -> None:
    """`patch` walks the heap for enclosing models; what the imports left there never holds one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared data: $HF_AUTONORM_SHARED, or `shared` beside the repository.

    A user's clone has none, its tests skip; where HF_AUTONORM_REQUIRE_SHARED says it must be there, they fail.
    """
    folder = Path(os.environ.get("HF_AUTONORM_SHARED", ROOT.parent / "shared"))
    if not folder.exists():
        if os.environ.get("HF_AUTONORM_REQUIRE_SHARED"):
            pytest.fail(f"no folder {folder}, which this run must not do without")
        pytest.skip(f"no folder {folder}: set HF_AUTONORM_SHARED to the shared data")
    return folder
