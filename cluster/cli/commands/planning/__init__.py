"""The planning commands: profile, simulate, plan, bench and compare."""
