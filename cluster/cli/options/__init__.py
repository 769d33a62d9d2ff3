"""Options and help texts of command groups; cluster.cli.main has the rest."""
