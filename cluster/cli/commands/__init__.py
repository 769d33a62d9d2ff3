"""One module per command of `tandem`."""
