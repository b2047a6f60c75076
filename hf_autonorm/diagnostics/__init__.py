"""Looking into a patched model."""
