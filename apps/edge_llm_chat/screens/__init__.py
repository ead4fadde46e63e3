"""Screens: they decide; widgets only show and tell."""
