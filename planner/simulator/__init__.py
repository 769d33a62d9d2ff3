"""A cluster in virtual time: the router's and the workers' own classes, with step times from a cost model."""
