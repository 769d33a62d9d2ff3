"""Plans, and what changed between two, as HTML pages."""
