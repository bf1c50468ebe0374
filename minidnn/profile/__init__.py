"""Profiles: how long each op takes with each algorithm and how much workspace it needs; measured or modelled."""
