"""What the reports of this package share: each prints as the table it is."""

from __future__ import annotations

import io
import re


class AsTable:
    """Gives `str()` and `print` from `table()`, a `rich.table.Table`."""

    def table(self):
        """A `rich.table.Table`."""
        raise NotImplementedError

    def __str__(self) -> str:
        from rich.console import Console

        # Plain text wherever it is asked for: in a notebook a console would also show the table by itself.
        text = io.StringIO()
        Console(width=120, file=text, markup=False, force_jupyter=False, force_terminal=False).print(self.table())
        return text.getvalue()


def pattern(name: str) -> str:
    """`encoder.layer.7.norm` → `encoder.layer.*.norm`: modules of repeated blocks share one."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name) or "(the model itself)"
