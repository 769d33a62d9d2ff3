"""The prefill service: the engine and the sending half of the handoff."""
