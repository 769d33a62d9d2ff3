"""Code that both roles share: the rank process with its step loop, and the service process."""
