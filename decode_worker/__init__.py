"""The decode role of a worker: the engine and the receiver of the handoff. It can prefill locally too."""
