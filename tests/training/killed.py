"""What test_breaks.py starts: training/train.py, ended by SIGKILL after an optimizer step.

killed.py STEP [options of training/train.py]
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from transformers import TrainerCallback

from training import train
from training.models import vit_lite


class Kill(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def apply_variant(*args, **kwargs):
    model, callbacks = patched(*args, **kwargs)
    return model, [*callbacks, Kill(int(sys.argv[1]))]


patched, train.apply_variant = train.apply_variant, apply_variant

if __name__ == "__main__":
    vit_lite.SIZES["depth"] = 2  # as the test has it
    train.main(sys.argv[2:])
