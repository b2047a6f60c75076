"""The cross entropy of every classification task here.

Not the models' own: the classification heads of many transformers models take `num_items_in_batch` and do not use it,
while Trainer relies on them to; their loss would grow with the processes and with the accumulated batches.
"""

from collections.abc import Callable

import torch
from torch.nn import functional


def cross_entropy(smoothing: float = 0.0) -> Callable:
    """For Trainer's `compute_loss_func`: the mean over all labels of an optimizer step, -100 left out.

    Logits are (batch, …, classes); labels are class indices (batch, …) or, of images, target probabilities (batch,
    classes). `smoothing` is for class indices in training; evaluations measure the plain loss.
    """

    def compute_loss(outputs, labels: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
        logits = outputs.logits.float()
        targets = labels.is_floating_point()
        options = {} if targets or not logits.requires_grad else {"label_smoothing": smoothing}
        if not targets:
            logits, labels = logits.flatten(0, -2), labels.flatten()
        loss = functional.cross_entropy(logits, labels, reduction="sum", **options)
        if num_items_in_batch is None:
            num_items_in_batch = labels.ne(-100).sum()
        # Trainer counts entries, of which a target has one a class.
        return loss * ((labels.shape[-1] if targets else 1) / num_items_in_batch)

    return compute_loss
