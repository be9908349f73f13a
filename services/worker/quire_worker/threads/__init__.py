"""The number of processor cores that this worker may use, and the sharing of them between its threads and its
neighbours."""
