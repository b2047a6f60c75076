"""Finding what can be patched, patching it, and undoing it."""
