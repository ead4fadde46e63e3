"""Widgets: they show what they are given and post messages; none calls a model or a database."""
