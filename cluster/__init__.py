"""The control plane: command line, spec, controller, backends, embedded Redis-compatible server."""
