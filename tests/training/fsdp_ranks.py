"""two_ranks.py with FSDP2 on the CPU.

accelerate (1.15) leaves FSDP out, without a word, for processes that it calls MULTI_CPU; called MULTI_GPU, the same
processes run it over gloo. All else is what GPUs run.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from accelerate import PartialState
from accelerate.utils import DistributedType

from tests.training import two_ranks
from training import train


def parse_args(argv):
    parsed = parse(argv)
    assert parsed[-1].device.type == "cpu"  # looking at it starts the process group
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return parsed


parse, train.parse_args = train.parse_args, parse_args

if __name__ == "__main__":
    two_ranks.main()
