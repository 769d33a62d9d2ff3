"""The decode service: the engine and the receiving half of the handoff. It can prefill locally too."""
