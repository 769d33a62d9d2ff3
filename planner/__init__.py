"""Planning: what work costs on given hardware and, later, how many workers of each role traffic needs. Torch-free."""
