"""What `accelerate launch` starts in test_two_processes.py: training/train.py, then once more from a checkpoint.

    two_ranks.py CHECKPOINT [options of training/train.py]

Both in one process, since starting it takes longer than training. Each rank leaves its parameters in rankN.pt.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import TrainerCallback

from training import train


class KeepParameters(TrainerCallback):
    def on_train_end(self, args, state, control, model, **kwargs):
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
        values = {
            name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in values.items()
        }
        torch.save(values, Path(args.output_dir, f"rank{args.process_index}.pt"))


def apply_variant(*args, **kwargs):
    model, callbacks = patched(*args, **kwargs)
    return model, [*callbacks, KeepParameters()]


patched, train.apply_variant = train.apply_variant, apply_variant


def main() -> None:
    checkpoint, *options = sys.argv[1:]
    folder = Path(options[options.index("--output_dir") + 1])
    train.main(options)
    resume = f"--resume_from_checkpoint={folder / checkpoint}"
    train.main([*options, resume, f"--output_dir={folder}-resumed"])


if __name__ == "__main__":
    main()
