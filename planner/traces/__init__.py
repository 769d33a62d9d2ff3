"""Traces of traffic, recorded or synthetic: arrivals, lengths, shared prefixes. They contain no prompt text."""
