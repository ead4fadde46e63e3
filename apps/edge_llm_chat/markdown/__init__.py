"""Markdown as lines of a terminal, also while it is still being written."""
