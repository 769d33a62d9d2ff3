"""Planning: predicts what work costs on given hardware, and finds the cluster that traffic needs. Torch-free."""
