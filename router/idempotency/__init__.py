"""Answers by idempotency key: a request that a client repeats is computed once."""
