"""The commands of `tandem`; their options are in cluster.cli.main and cluster.cli.options."""
