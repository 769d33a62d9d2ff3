"""The prefill role of a worker: the engine and the sender of the handoff."""
