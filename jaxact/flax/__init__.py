"""Adapters for Flax: the only files that import it."""
