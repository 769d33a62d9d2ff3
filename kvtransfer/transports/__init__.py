"""Transports of a link's bytes. Each implements two narrow protocols, sender and receiver."""
