"""A cluster in virtual time: the classes of the real router and workers, with step times from a cost model."""
