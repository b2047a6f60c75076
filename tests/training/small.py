"""A model of one norm that Trainer trains in no time."""

from torch import nn
from torch.nn import functional


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)

    def forward(self, x, labels=None):
        prediction = self.head(self.norm(self.first(x)))[:, 0]
        return {"loss": functional.mse_loss(prediction, labels), "logits": prediction}
