"""Random tensors from their own generator: the global random state is neither read nor changed."""

import zlib

import torch


class Draw:
    """Tensors that depend on a seed and a label alone."""

    def __init__(self, seed: int, label: str) -> None:
        self.generator = torch.Generator().manual_seed(seed * 1000003 + zlib.crc32(label.encode()) % 1000003)

    def normal(self, *shape: int) -> torch.Tensor:
        """Standard normal floats."""
        return torch.randn(*shape, generator=self.generator)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Floats in [0, 1)."""
        return torch.rand(*shape, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator)

    def ids(self, *shape: int) -> torch.Tensor:
        """Token ids that are in every small vocabulary and rarely special."""
        return self.integers(5, 200, *shape)

    def among(self, pool: torch.Tensor, *shape: int) -> torch.Tensor:
        """Elements of a 1-d tensor."""
        return pool[self.integers(0, len(pool), *shape)]

    def boxes(self, *shape: int) -> torch.Tensor:
        """Integer boxes (x0, y0, x1, y1) in 0..99, of shape (*shape, 4)."""
        corner, size = self.integers(0, 50, *shape, 2), self.integers(1, 50, *shape, 2)
        return torch.cat([corner, corner + size], -1)
