"""The load generator: plays the simulator's traces against a live server, open loop."""
