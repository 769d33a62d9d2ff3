"""Corrections of a cost model that make simulations fit a running cluster, from its recorded requests."""
