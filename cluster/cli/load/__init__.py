"""Open-loop load on a live cluster, from the traces that the simulator plays."""
