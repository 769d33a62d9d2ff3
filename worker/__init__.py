"""What prefill and decode workers share: the rank process with its step loop, and the service process."""
