"""The search for the cheapest cluster that serves given traffic within its objectives."""
