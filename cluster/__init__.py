"""The control plane: command line, spec, controller, backends and the embedded Redis-compatible server."""
