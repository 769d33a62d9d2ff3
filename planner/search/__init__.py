"""Which cluster serves given traffic within its objectives for the least money."""
