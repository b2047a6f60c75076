"""What the reports of this package share: each prints as the table it is."""

from __future__ import annotations


class AsTable:
    """Gives `str()` and `print` from `table()`, a `rich.table.Table`."""

    def table(self):
        """A `rich.table.Table`."""
        raise NotImplementedError

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=120)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()
