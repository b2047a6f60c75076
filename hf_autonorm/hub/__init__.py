"""Saving, loading and sharing patched models."""
