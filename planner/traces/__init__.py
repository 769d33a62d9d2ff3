"""Traces: what traffic was, or might be, in one form: arrivals, lengths, shared prefixes. No prompt text anywhere."""
